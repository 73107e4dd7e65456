"""A rank's assignment in a generation, and the job, plan and data that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import load_plan
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.capacity_check import DevicePeak
from worker.checkpoint.piece_sources import (
    STORAGE_TIMEOUT_S,
    DurableSource,
    LocalSource,
    PeerSource,
    PeerTls,
    PieceSource,
)
from worker.checkpoint.reader import Reader
from worker.checkpoint.snapshots.snapshot_manager import SnapshotTarget
from worker.control import work_folder
from worker.data.batch import DataSource
from worker.data.sources.open_data import open_data
from worker.devices.rank_device import rank_device
from worker.distributed.rendezvous import RendezvousInfo
from worker.layout.rank_layout import plan_problems, rank_places
from worker.models.apply_plan import ShardValues
from worker.models.built_in import exact
from worker.models.starting_weights import open_weights, zero_weights
from worker.models.user_module.module_layers import ModuleSource
from worker.script.open_job import recipe_of
from worker.spec_protocol import SPEAKS, why_incompatible

WAIT_S = 600.0
"""Deadline of a collective in seconds, if the agent does not set one."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Where a generation starts from."""

    step: int
    generation: int
    source: str
    """``start``, ``memory`` or ``durable``."""


class Assignment:
    """One rank's assignment, as received from the agent or the fork server."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        if why := why_incompatible(SPEAKS, spec.get("needs", 0)):
            raise ValueError(why)
        self.spec = spec
        self.job: str = spec["job"]
        self.generation: int = spec["generation"]
        self.named = {"job": self.job, "generation": self.generation}
        """In each line of the log."""
        self.rank: int = spec["rank"]
        self.threads: int = spec["threads"]
        self.fail_at: str | None = spec.get("fail_at")
        """The fail point of this rank, for tests."""
        self.folder = Path(spec["folder"]).parent
        """The generation's folder, with plan and job."""
        self.base = Path(spec.get("base") or self.folder)
        """Paths in the job are relative to this folder."""
        restore = spec["restore"]  # Here and below, what a newer agent adds is passed over.
        self.restore = RestorePoint(restore["step"], restore["generation"], restore["source"])
        self.device = rank_device(spec["device"], spec.get("device_type"))
        self.wait_s = float(spec.get("wait_s", WAIT_S))
        """Seconds that this rank waits for another one that is not known to be lost."""
        peak = spec.get("peak")
        self.peak = None if peak is None else DevicePeak(peak["tensors"], peak["context"])
        """The predicted peak of this rank's device memory; ``None``: no prediction."""
        self.device_bytes: int | None = spec.get("device_bytes")
        """The declared memory of an emulated device; ``None``: the device is real."""
        self.rendezvous = RendezvousInfo(
            self.generation, self.rank, spec["ranks"], spec["host"], self.device, self.wait_s
        )
        self.snapshot_target = SnapshotTarget(
            job=self.job,
            generation=self.generation,
            term=spec["term"],
            node=spec["node"],
            memory=Path(spec["memory"]),
            memory_every=spec["memory_every"],
            persist_every=spec["persist_every"],
            zones={node: peer["zone"] for node, peer in spec["peers"].items()},
            needed=self._needed(),
        )

    def _needed(self) -> frozenset[tuple[int, int]] | None:
        """Return generation and step of the points of past generations that this one may need."""
        fallback, restore = self.spec.get("fallback"), self.restore
        if fallback is None:
            return None
        begun_from = restore.generation, restore.step
        return frozenset({begun_from, (fallback["generation"], fallback["step"])})

    @cached_property
    def plan(self) -> Plan:
        return load_plan(self.folder / "plan.json")

    def node_of(self, rank: int) -> str | None:
        """Return the node of a rank."""
        place = rank_places(self.plan)[rank]
        return self.plan.pipelines[place.pipeline].stages[place.stage].places[0].node

    def sources(self) -> list[list[PieceSource]]:
        """Return the sources of the restore point, the nearest and cheapest first."""
        restore, spec = self.restore, self.spec
        if restore.source == "start":
            return []
        point = {"generation": restore.generation, "step": restore.step}
        peers = spec["peers"]
        zone = peers.get(spec["node"], {}).get("zone")
        groups: list[list[PieceSource]] = [
            [LocalSource.at(Path(spec["memory"]), self.job, **point)]
        ]
        tls, reader = PeerTls.of(spec.get("tls")), Reader.of(spec)
        for is_near in (True, False):
            groups.append(
                [
                    PeerSource.at(
                        peer["name"],
                        peer["address"],
                        reader,
                        self.job,
                        tls,
                        # An agent of an older version does not send has_left.
                        life="" if peer.get("has_left") else node,
                        **point,
                    )
                    for node, peer in peers.items()
                    if node != spec["node"] and (peer["zone"] == zone) == is_near
                ]
            )
        if by_agent := spec.get("checkpoint"):
            where = by_agent["address"], by_agent["path"], reader, tls
            node = by_agent["name"]
            groups.append(
                [PeerSource("durable storage", *where, node=node, timeout_s=STORAGE_TIMEOUT_S)]
            )
        if spec.get("manifest"):
            groups.append([DurableSource(spec["manifest"])])
        return groups


@dataclass(frozen=True, slots=True)
class OpenJob:
    """What a worker needs besides the state."""

    job: Job
    plan: Plan
    data: DataSource
    weights: Callable[[int], ShardValues] | None
    module: ModuleSource | None = None
    """A user's module, which trains instead of a known model."""


@dataclass(eq=False)
class JobCache:
    """Keeps a job open across generations."""

    _text: bytes = b""
    _job: Job | None = None
    _data: DataSource | None = None
    _weights: Callable[[int], ShardValues] | None = None
    _module: ModuleSource | None = None

    def open(self, about: Assignment) -> OpenJob:
        """Read the job and the plan, and open the data; ``InputError`` says what is wrong."""
        path = about.folder / "job.toml"
        text = path.read_bytes()
        if self._job is None or self._data is None or text != self._text:
            self._job = load_job(path)
            if self._job.script is not None:
                work_folder.check(about.spec.get("work", {}))
            recipe = recipe_of(self._job, about.base)
            if recipe is None:
                self._module = None
                self._data = open_data(self._job, about.base)
                self._weights = open_weights(self._job, about.base)
            else:
                self._module, self._data = recipe, recipe.data(self._job.data.samples)
            self._text = text
        job, plan = self._job, about.plan
        found = list(exact.exact_problems(job)) if job.model.family == "exact" else []
        found += plan_problems(plan, job)
        if found:
            raise InputError(found)
        weights = self._weights if about.restore.source == "start" else zero_weights(job)
        return OpenJob(job, plan, self._data, weights, self._module)
