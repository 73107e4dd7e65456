"""What this node's workers are told of a generation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.daemon.failpoints import FAIL_AT
from agents.protocol.records import Durable, GenerationRecord, NodeId, NodeRecord
from agents.rpc.signing import ticket
from agents.workers.rank_map import Seating


@dataclass(frozen=True, slots=True)
class Briefing:
    """All that the store says of a generation."""

    record: GenerationRecord
    plan: str
    job: str
    """The job's own file."""
    nodes: tuple[NodeRecord, ...]
    durable: Durable | None


@dataclass(frozen=True, slots=True)
class Site:
    """What is the same for all generations on this node."""

    state: Path
    memory: Path
    key: bytes
    data: Path | None
    """Where files stand that the job names."""
    orphan_s: float
    threads: int
    device_bytes: int | None = None
    """The memory of a device that is not there; ``None``: the driver knows."""

    @property
    def socket(self) -> Path:
        """Where workers speak."""
        return self.state / "workers.sock"

    def home(self, generation: int) -> Path:
        """The folder of a generation."""
        return self.state / "generation" / str(generation)


def write_home(site: Site, briefing: Briefing) -> Path:
    """Lay down the files that workers read."""
    home = site.home(briefing.record.number)
    home.mkdir(parents=True, exist_ok=True)
    (home / "plan.json").write_text(briefing.plan, encoding="utf-8")
    (home / "job.toml").write_text(briefing.job, encoding="utf-8")
    return home


def specs(
    site: Site, briefing: Briefing, seating: Seating, node: NodeRecord
) -> Iterator[dict[str, Any]]:
    """One for each of this node's ranks; plain values, as they travel in JSON."""
    record, home = briefing.record, site.home(briefing.record.number)
    peers = {
        peer.id: {"address": peer.address, "zone": peer.zone, "name": peer.name}
        for peer in briefing.nodes
    }
    for rank, device in seating.devices.items():
        folder = home / str(rank)
        folder.mkdir(exist_ok=True)
        yield {
            "job": record.job,
            "generation": record.number,
            "term": record.term,
            "rank": rank,
            "ranks": seating.ranks,
            "device": device,
            "node": node.id,
            "host": host_of(node),
            "folder": str(folder),
            "restore": {
                "step": record.restore.point.step,
                "generation": record.restore.point.generation,
                "source": record.restore.source,
            },
            "base": None if site.data is None else str(site.data),
            "memory": str(site.memory),
            "wait_s": record.wait_s,
            "peak": None if rank >= len(record.peaks) else asdict(record.peaks[rank]),
            "device_bytes": site.device_bytes,
            "memory_every": record.memory_every,
            "persist_every": record.persist_every,
            "peers": peers,
            "ticket": ticket(site.key, record.job),
            "manifest": _manifest(briefing),
            "socket": str(site.socket),
            "orphan_s": site.orphan_s,
            "threads": site.threads,
            "fail_at": os.environ.get(FAIL_AT, ""),  # In tests.
        }


def host_of(node: NodeRecord) -> str:
    """The host under which others reach the node."""
    return node.address.rpartition(":")[0].strip("[]")


def address_of(briefing: Briefing, id_: NodeId) -> str | None:
    """Where the agent of a node is."""
    return next((node.address for node in briefing.nodes if node.id == id_), None)


def _manifest(briefing: Briefing) -> str | None:
    """Where the restore point is durable too: the last source, or the only one."""
    restore, durable = briefing.record.restore, briefing.durable
    if durable is None or durable.point != restore.point:
        return None
    return durable.manifest
