"""The spec that the agent gives each rank of a generation on this node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.daemon.failpoints import FAIL_AT
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import (
    Durable,
    GenerationRecord,
    JobId,
    KnownGeneration,
    NodeId,
    NodeRecord,
)
from agents.rpc.grants import make_grant
from agents.rpc.signing import ClusterKey, ticket
from agents.rpc.tls import Tls
from simulator.documents.files import parse_document
from simulator.inputs.plan_file import plan_from_document
from worker.layout.rank_layout import rank_places
from worker.spec_protocol import NEEDS


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which ranks of a plan run on a node, and on which of its devices."""

    ranks: int
    """Of the whole plan."""
    devices: dict[int, int]
    """The device of each rank of this node, by rank."""
    first: NodeId | None
    """The node of rank 0; ``None``: the plan does not say."""


def read_rank_map(plan_text: str, node: NodeId) -> RankMap:
    """Read a node's ranks from a stored plan; ``InputError`` says what is wrong with the plan."""
    plan = plan_from_document(parse_document(plan_text.encode(), name="plan"))
    devices: dict[int, int] = {}
    first: NodeId | None = None
    ranks = rank_places(plan)
    for rank in ranks:
        place = plan.pipelines[rank.pipeline].stages[rank.stage].places[0]
        if rank.rank == 0 and place.node is not None:
            first = NodeId(place.node)
        if place.node == node:
            devices[rank.rank] = place.devices[rank.index] if place.devices else len(devices)
    return RankMap(len(ranks), devices, first)


@dataclass(frozen=True, slots=True)
class GenerationDetails:
    """A generation's record and all that the store holds for its workers."""

    record: GenerationRecord
    plan: str
    job: str
    """The job file, as it was submitted."""
    nodes: tuple[NodeRecord, ...]
    durable: Durable | None
    left: tuple[NodeRecord, ...] = ()
    """Nodes whose lease has ended lately: their agents may still answer."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of workers that are the same for all generations on this node."""

    state: Path
    memory: Path
    key: ClusterKey
    data: Path | None
    """The folder that relative paths of the job refer to."""
    orphan_s: float
    threads: int
    device_bytes: int | None = None
    """The memory of an emulated device; ``None``: the driver knows."""
    tls: Mapping[str, Any] | None = None
    """What workers verify peers' agents with; ``None``: they speak plain HTTP."""
    checkpoint_path: Callable[[JobId, str], str] | None = None
    """Returns the path of a manifest at this agent, through which workers of another user read it;
    ``None``: they read the storage themselves."""
    own_tls: Tls | None = None
    """The agent's own: it signs what workers read with; ``None``: plain HTTP."""

    @property
    def socket(self) -> Path:
        """Where workers connect."""
        return self.state / "workers.sock"

    def home(self, generation: int) -> Path:
        """Return the folder of a generation."""
        return self.state / "generation" / str(generation)


def write_generation_files(settings: WorkerSettings, details: GenerationDetails) -> Path:
    """Write the plan and the job, which workers read; return the generation's folder."""
    home = settings.home(details.record.number)
    home.mkdir(parents=True, exist_ok=True)
    (home / "plan.json").write_text(details.plan, encoding="utf-8")
    (home / "job.toml").write_text(details.job, encoding="utf-8")
    known = KnownGeneration(details.record, details.plan, details.job, details.durable)
    (home / "known.json").write_bytes(encode(known))
    return home


def read_known_generation(settings: WorkerSettings, number: int) -> KnownGeneration | None:
    """Return what was written of a generation of this node; ``None``: nothing readable."""
    try:
        return decode(KnownGeneration, (settings.home(number) / "known.json").read_bytes())
    except (OSError, WireError):
        return None


def specs(
    settings: WorkerSettings,
    details: GenerationDetails,
    rank_map: RankMap,
    node: NodeRecord,
    work: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield the spec of each of this node's ranks, as plain values for JSON."""
    record, home = details.record, settings.home(details.record.number)
    manifest = None
    if (durable := details.durable) is not None and durable.point == record.restore.point:
        manifest = durable.manifest  # It is read where memory does not have the restore point.
    peers = {
        peer.id: {
            "address": peer.address,
            "zone": peer.zone,
            "name": peer.name,
            "has_left": peer in details.left,
        }
        for peer in (*details.nodes, *details.left)
    }
    who = record.job, record.number, node.name
    grant, secret = make_grant(settings.key, settings.own_tls, *who, at=time.time())
    for rank, device in rank_map.devices.items():
        folder = home / str(rank)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o770)  # The worker writes there, also as another user of the agent's group.
        yield {
            "needs": NEEDS,
            "job": record.job,
            "generation": record.number,
            "term": record.term,
            "rank": rank,
            "ranks": rank_map.ranks,
            "device": device,
            "device_type": "cuda" if settings.device_bytes is None else "cpu",
            "node": node.id,
            "host": node.address.rpartition(":")[0].strip("[]"),
            "folder": str(folder),
            "restore": {
                "step": record.restore.point.step,
                "generation": record.restore.point.generation,
                "source": record.restore.source,
            },
            "fallback": None if record.fallback is None else asdict(record.fallback),
            "base": None if settings.data is None else str(settings.data),
            "work": work,
            "memory": str(settings.memory),
            "wait_s": record.wait_s,
            "peak": None if rank >= len(record.peaks) else asdict(record.peaks[rank]),
            "device_bytes": settings.device_bytes,
            "memory_every": record.memory_every,
            "persist_every": record.persist_every,
            "peers": peers,
            "ticket": ticket(settings.key, *who, at=time.time()),
            "reader": {"grant": grant, "secret": secret},
            "tls": settings.tls,
            "manifest": manifest if settings.checkpoint_path is None else None,
            "checkpoint": _path_through_agent(settings, node, record.job, manifest),
            "socket": str(settings.socket),
            "orphan_s": settings.orphan_s,
            "threads": settings.threads,
            "fail_at": os.environ.get(FAIL_AT, ""),  # In tests.
        }


def _path_through_agent(
    settings: WorkerSettings, node: NodeRecord, job: JobId, manifest: str | None
) -> dict[str, str] | None:
    if settings.checkpoint_path is None or manifest is None:
        return None
    path = settings.checkpoint_path(job, manifest)
    return {"name": node.name, "address": node.address, "path": path}
