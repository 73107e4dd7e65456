"""The state of a worker that trains nothing: real files with made-up bytes, sealed and fetched.

What a piece holds is a function of the job's step alone, as in a real job whose replicas agree, so
that everybody can tell whether what arrives is what was meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.rpc.signing import TICKET_HEADER
from simulator.documents.files import parse_document
from simulator.inputs.job_file import job_from_document
from simulator.inputs.plan_file import load_plan
from worker.checkpoint import snapshot_file
from worker.layout.rank_layout import atoms_held, rank_places

PIECE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of the state, and who else does."""

    spec: Mapping[str, Any]
    layers: int
    atoms: int
    nodes: Mapping[tuple[int, int], tuple[str, ...]]
    """For each piece that this rank holds, the nodes that hold it, each once."""
    written: frozenset[tuple[int, int]]
    """The pieces of which this rank is the first holder."""


def share_of(spec: Mapping[str, Any]) -> Share:
    """Read it from the plan and the job beside the worker's folder."""
    home = Path(spec["folder"]).parent
    plan = load_plan(home / "plan.json")
    document = parse_document((home / "job.toml").read_bytes(), name="job", flaws_raise=False)
    job = job_from_document(document)
    layers, atoms = len(job.model.layers), job.max_tp
    holders: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for seat in rank_places(plan):
        place = plan.pipelines[seat.pipeline].stages[seat.stage].place
        held = (*atoms_held(tp=seat.tp, index=seat.index, atoms=atoms), atoms)
        # What layers share is with those that have the first or the last of them.
        shared = (layers,) if seat.is_first or seat.is_last else ()
        for layer in (*range(*seat.layers), *shared):
            for piece in held:
                holders[layer, piece].append((seat.rank, str(place.node)))
    own = {key: ranks for key, ranks in holders.items() if any(r == spec["rank"] for r, _ in ranks)}
    return Share(
        spec,
        layers + 1,
        atoms,
        {key: tuple(dict.fromkeys(node for _, node in ranks)) for key, ranks in own.items()},
        frozenset(key for key, ranks in own.items() if min(ranks)[0] == spec["rank"]),
    )


def content(job: str, key: tuple[int, int], step: int) -> bytes:
    """The bytes of one piece after so many steps."""
    seed = hashlib.sha256(f"{job} {key} {step}".encode()).digest()
    return seed * (PIECE_BYTES // len(seed))


def seal(share: Share, step: int) -> None:
    """Write the rank's snapshot of a step and seal it."""
    spec = share.spec
    every = spec["persist_every"]
    header = snapshot_file.with_offsets(
        snapshot_file.Header(
            job=spec["job"],
            generation=spec["generation"],
            step=step,
            term=spec["term"],
            rank=spec["rank"],
            node=spec["node"],
            atoms=share.atoms,
            layers=share.layers,
            dtype="float32",
            moments=2,
            model="none",
            persist=every is not None and step % every == 0,
            progress=snapshot_file.SavedProgress(step, step, 1.0, 0, "", 0, 0),
            pieces=tuple(_piece(share, key, step) for key in sorted(share.nodes)),
        )
    )
    memory = Path(spec["memory"])
    name = snapshot_file.part_name(spec["generation"], spec["rank"], os.getpid(), step)
    early = memory / spec["job"] / name
    with os.fdopen(snapshot_file.create(early, header.total_bytes), "r+b") as file:
        for piece in header.pieces:
            os.pwrite(file.fileno(), content(spec["job"], piece.key, step), piece.offset)
        os.pwrite(file.fileno(), snapshot_file.head_bytes(header), 0)
    folder = snapshot_file.point_folder(
        memory, spec["job"], generation=spec["generation"], step=step
    )
    folder.mkdir(exist_ok=True)
    early.rename(folder / header.file_name)


def _piece(share: Share, key: tuple[int, int], step: int) -> snapshot_file.Piece:
    checksum = snapshot_file.checksum(content(share.spec["job"], key, step))
    is_written = key in share.written
    piece = snapshot_file.Piece(*key, 0, PIECE_BYTES, checksum, is_written)
    if len(share.nodes[key]) > 1 or not is_written:
        return piece
    return replace(piece, buddy=_buddy(share))


def _buddy(share: Share) -> str | None:
    """The next node of another zone, or else the next node."""
    peers, own = share.spec["peers"], share.spec["node"]
    zone = peers.get(own, {}).get("zone")
    order = sorted(peers)
    at = order.index(own) if own in order else 0
    others = [*order[at + 1 :], *order[:at]]
    return min(others, key=lambda id_: peers[id_]["zone"] == zone, default=None)


def fetch(share: Share) -> str:
    """Read all that the rank is to hold, here or from peers; return what cannot be had."""
    restore, job = share.spec["restore"], share.spec["job"]
    if restore["source"] != "memory":
        return ""
    wanted = set(share.nodes)
    point = {"generation": restore["generation"], "step": restore["step"]}
    for found in snapshot_file.sealed_files(
        snapshot_file.point_folder(Path(share.spec["memory"]), job, **point)
    ):
        for piece in found.header.pieces:
            if snapshot_file.read_piece(found.path, piece) == content(
                job, piece.key, restore["step"]
            ):
                wanted.discard(piece.key)
    for peer in share.spec["peers"].values():
        if wanted:
            wanted -= _fetched(share, peer["address"], wanted)
    return f"nobody has {sorted(wanted)[:3]} of step {restore['step']}" if wanted else ""


def _fetched(share: Share, address: str, wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    restore, job = share.spec["restore"], share.spec["job"]
    base = f"http://{address}/v1/memory/{job}/{restore['generation']}-{restore['step']}"
    found = set()
    try:
        for each in json.loads(_get(base, share.spec["ticket"])):
            header = snapshot_file.header_from(each["header"], name=each["file"])
            for piece in header.pieces:
                if piece.key in wanted:
                    end = piece.offset + piece.bytes - 1
                    ticket, span = share.spec["ticket"], f"bytes={piece.offset}-{end}"
                    data = _get(f"{base}/{each['file']}", ticket, span)
                    snapshot_file.check_piece(data, piece, name=base)
                    if data == content(job, piece.key, restore["step"]):
                        found.add(piece.key)
    except (OSError, ValueError):
        pass  # It is gone, or has nothing of that; there are others.
    return found


def _get(url: str, ticket: str, span: str | None = None) -> bytes:
    headers = {TICKET_HEADER: ticket, **({} if span is None else {"Range": span})}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=2.0) as answer:
        return bytes(answer.read())
