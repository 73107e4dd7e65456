"""Checkpoints of a tiny model, written as two workers would, without training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agents.protocol.records import (
    FIRST,
    Durable,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    Point,
    Saving,
    Uploaded,
)
from sailord.checkpoints.manifest import Manifest, folder_of, manifest_bytes, manifest_name
from sailord.checkpoints.object_storage import Storage, open_storage
from sailord.checkpoints.verify import compose
from sailord.core.model.commands import WriteManifest
from sailord.planning.job_spec import job_shape, read_job
from simulator.spec.job import Job
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.by_tensor.write_snapshot import write_snapshot
from worker.checkpoint.snapshot_file import (
    Header,
    SavedProgress,
    head_bytes,
    head_checksum,
    partial_header,
    read_header,
    read_piece,
)
from worker.layout.rank_layout import TIED
from worker.layout.tensor_table import tensors_of
from worker.models.weight_files.foreign_tensors import TensorId, whole_tensor

JOB = JobId("j")
SPEC = """
[model]
family = "gpt2"
layers = 2
hidden = 16
heads = 4
vocab = 61
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
"""
WRITERS = 2


NamedTensors = dict[TensorId, torch.Tensor]


@dataclass(frozen=True)
class FullCheckpoint:
    """A checkpoint as full tensors in memory: the weights, then the optimizer's moments."""

    job: Job
    progress: SavedProgress
    kinds: tuple[NamedTensors, ...]


def write_full(whole: FullCheckpoint, name: str, out: Path) -> Header:
    """Write full tensors as one sealed file with all pieces."""
    tensors = [whole_tensor("", key, tuple(value.shape)) for key, value in whole.kinds[0].items()]

    def read(tensor, kind):
        return whole.kinds[kind][tensor.tensors[0]]

    return write_snapshot(whole.job, whole.progress, tensors, len(whole.kinds), read, name, out)


def read_full(manifest: str) -> FullCheckpoint:
    """Read all tensors of a checkpoint."""
    state = open_saved_state(manifest)
    kinds = [{key: state.tensor(key, kind) for key in state.pieces.specs} for kind in state.kinds]
    return FullCheckpoint(state.job, state.progress, tuple(kinds))


def pieces_of(path: Path) -> list[tuple[tuple[int, int], bytes]]:
    """Return each piece of a sealed file: its key and its bytes."""
    return [(piece.key, read_piece(path, piece)) for piece in read_header(path).pieces]


@dataclass(frozen=True)
class Made:
    """A checkpoint and what went into it."""

    manifest: Manifest
    durable: Durable
    whole: FullCheckpoint


def whole_state(spec: str, step: int, *, seed: int = 0) -> FullCheckpoint:
    """Random numbers for every tensor; the moments' are not negative. Padding is zero."""
    job = read_job(spec)
    generator = torch.Generator().manual_seed(1000 * seed + step)
    true = {
        (index, tensor.name): tensor.shape
        for index, layer in enumerate(job.model.layers)
        for tensor in layer.tensors
    }
    kinds: list[NamedTensors] = [{}, {}, {}]
    for layer, specs in tensors_of(job).items():
        for tensor in specs:
            key = (0 if layer == TIED else layer, tensor.name)
            for kind in kinds:
                kind[key] = torch.rand(tensor.shape, generator=generator)
                kind[key][true[key][0] :] = 0
    progress = SavedProgress(step, step, 1.0, 0, "", 8 * step, 64 * step)
    return FullCheckpoint(job, progress, tuple(kinds))


def make(
    folder: Path,
    step: int,
    *,
    generation: int = 1,
    parent: Durable | None = None,
    term: int = 3,
    spec: str = SPEC,
    seed: int = 0,
    whole: FullCheckpoint | None = None,
) -> Made:
    """Upload the state of a step, random unless it is given, in two objects and a manifest."""
    storage = open_storage(f"file://{folder}")
    point = Point(step, generation)
    whole = whole or whole_state(spec, step, seed=seed)
    file = folder / f"whole-{step}-{generation}"
    folder.mkdir(exist_ok=True)
    header = write_full(whole, JOB, file)
    parts = tuple(_upload(storage, file, header, point, rank) for rank in range(WRITERS))
    file.unlink()
    layers, atoms = job_shape(whole.job)
    job = JobRecord(JOB, "running", layers=layers, atoms=atoms, saving=Saving(storage.uri))
    record = GenerationRecord(JOB, generation, "open", "sha", (), FIRST, term, "")
    order = WriteManifest(job, record, parts, point, parent)
    manifest = compose(storage, order, term=term, spec=spec)
    data, sha256 = manifest_bytes(manifest)
    name = manifest_name(JOB, point, term)
    storage.write(name, data)
    return Made(manifest, Durable(point, storage.uri_of(name), sha256), whole)


def _upload(storage: Storage, file: Path, header: Header, point: Point, rank: int) -> Uploaded:
    """Every other piece, as the object of one writer."""

    keys = [p.key for number, p in enumerate(header.pieces) if number % WRITERS == rank]
    own = replace(header, generation=point.generation, rank=rank, node=f"n{rank}")
    mine = partial_header(own, keys)
    data = bytearray(mine.total_bytes)
    source = file.read_bytes()
    old = {piece.key: piece for piece in read_header(file).pieces}
    for piece in mine.pieces:
        begin = old[piece.key].offset
        data[piece.offset : piece.offset + piece.bytes] = source[begin : begin + piece.bytes]
    head = head_bytes(mine)
    data[: len(head)] = head
    name = f"{folder_of(JOB, point)}/{rank}-n{rank}.1.snap"
    storage.write(name, bytes(data))
    holds = tuple(Holding(layer, piece, piece + 1) for layer, piece in keys)
    return Uploaded(point, storage.uri_of(name), len(data), head_checksum(head), holds)


def chain(folder: Path, *steps: int) -> list[Made]:
    """Several checkpoints, each the next one's parent."""
    found: list[Made] = []
    for step in steps:
        found.append(make(folder, step, parent=found[-1].durable if found else None))
    return found


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
