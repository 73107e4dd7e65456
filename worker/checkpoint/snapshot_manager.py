"""When a rank takes snapshots, what it waits for, and which of its older ones it still needs.

Which steps are kept is a function of the step, so that all ranks keep the same ones. A rank takes
part in the vote of such a step only when it has sealed the one before, and when the agent has
copies made of the one before that, where they are needed: so a vote that is over says to
everybody which points are complete everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.capacity_check import SnapshotPlacement, check_room, node_need
from worker.checkpoint.compatibility import dtype_of, model_of
from worker.checkpoint.load_state import fill_buffers
from worker.checkpoint.placement import PieceKey, StateShape
from worker.checkpoint.replica_check import DIGEST_END, check_replicas
from worker.checkpoint.snapshot_file import Header, NoRoomError, Piece, SavedProgress, with_offsets
from worker.checkpoint.snapshot_writer import CopySources, OnMilestone, SnapshotWriter
from worker.checkpoint.stall_stats import StallStats
from worker.distributed.interface import Transport
from worker.engines.interface import TrainingEngine
from worker.layout.rank_layout import Holdings, rank_places
from worker.training.optimizer import OptimizerStep
from worker.training.precision import LossScale, precision_of
from worker.training.trainer import TrainingProgress

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class SnapshotTarget:
    """What the agent tells a rank of its place, as far as its snapshots say it."""

    job: str
    generation: int
    term: int
    node: str
    memory: Path
    memory_every: int
    persist_every: int | None
    zones: Mapping[str, str]
    """Of all nodes that are known."""


def state_shape(job: Job) -> StateShape:
    """Of what the job's pieces consist."""
    return StateShape(
        layers=len(job.model.layers),
        atoms=job.max_tp,
        item_bytes=precision_of(job).master.itemsize,
        moments=OptimizerStep.moment_count(job),
    )


def placement_of(
    job: Job, plan: Plan, holdings: Holdings, target: SnapshotTarget
) -> SnapshotPlacement:
    """Who keeps what under the plan."""
    return SnapshotPlacement.of(
        plan,
        holdings,
        state_shape(job),
        zero=job.zero,
        survive=job.checkpoint.survive,
        zones=target.zones,
    )


def check_node(job: Job, plan: Plan, holdings: Holdings, target: SnapshotTarget) -> None:
    """Raise ``NoRoomError`` if the node's memory cannot hold what its ranks are going to keep."""
    need = node_need(placement_of(job, plan, holdings, target), target.node)
    check_room(need, target.memory, target.job, target.generation)


def header_of(trainer: TrainingEngine, target: SnapshotTarget) -> tuple[Header, SnapshotPlacement]:
    """What a rank's files say, before there is one, and who keeps what besides."""
    shape = state_shape(trainer.job)
    sharing = placement_of(trainer.job, trainer.plan, trainer.holdings, target)
    pieces = tuple(
        Piece(
            *key,
            offset=0,
            bytes=sharing.sizes[key],
            is_written=sharing.writers[key] == trainer.rank,
            buddy=sharing.buddies.get(key) if sharing.writers[key] == trainer.rank else None,
        )
        for key, ranks in sharing.holders.items()
        if trainer.rank in ranks
    )
    header = Header(
        job=target.job,
        generation=target.generation,
        step=0,
        term=target.term,
        rank=trainer.rank,
        node=target.node,
        atoms=shape.atoms,
        layers=shape.layers + 1,
        dtype=dtype_of(trainer.job),
        moments=shape.moments,
        model=model_of(trainer.job),
        persist=False,
        progress=progress_of(trainer),
        pieces=pieces,
    )
    return with_offsets(header), sharing


def progress_of(trainer: TrainingEngine) -> SavedProgress:
    """How far training is, as headers say it."""
    now = trainer.progress
    return SavedProgress(
        step=now.step,
        updates=now.updates,
        scale=now.scale.factor,
        good_steps=now.scale.good_steps,
        sample_hash=now.sample_hash,
        samples=now.samples,
        label_tokens=now.label_tokens,
    )


def load_snapshot(
    trainer: TrainingEngine, told: SavedProgress, bodies: Mapping[PieceKey, bytearray | memoryview]
) -> None:
    """Let a rank go on from where a snapshot was taken."""
    fill_buffers(trainer.buffers, bodies, state_shape(trainer.job), trainer.precision)
    scale = LossScale(told.scale, told.good_steps)
    trainer.progress = TrainingProgress(
        told.step, told.updates, scale, told.sample_hash, told.samples, told.label_tokens
    )
    trainer.import_state()


def _kinds_of(plan: Plan) -> dict[int, str]:
    """What each rank computes on."""
    return {
        each.rank: plan.pipelines[each.pipeline].stages[each.stage].places[0].gpu
        for each in rank_places(plan)
    }


@dataclass(eq=False)
class SnapshotManager:
    """One rank's snapshots of one generation, and the wish to stop."""

    trainer: TrainingEngine
    target: SnapshotTarget
    writer: SnapshotWriter
    transport: Transport
    has_buddies: bool
    stalls: StallStats
    sharing: SnapshotPlacement
    stop_at: int | None = None
    """At the end of this step, or of a later one if that is over, all are to stop."""
    _kept: list[int] = field(default_factory=list)
    """The points of which this generation has taken snapshots."""
    _safe: int = 0
    """Points before it are not needed any more."""
    _replicated: int = -1
    _compared: int = -1
    """The last point that is to become durable and was found the same on all that hold it."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def open(
        cls,
        trainer: TrainingEngine,
        target: SnapshotTarget,
        transport: Transport,
        *,
        on_sealed: Callable[[int], None],
        reached: OnMilestone,
        on_short: Callable[[int], None] = lambda _: None,
    ) -> SnapshotManager:
        """Make room for all the snapshots that there may be at once."""
        header, sharing = header_of(trainer, target)
        sources = CopySources.of(header, trainer.buffers)
        stalls = StallStats(sharing.waits)

        def sealed(step: int) -> None:
            stalls.sealed(step)
            on_sealed(step)

        writer = SnapshotWriter(target.memory, header, sources, sealed, reached, on_short)
        writer.reserve(sharing.files)
        return cls(trainer, target, writer, transport, sharing.waits, stalls, sharing)

    # ---- from other threads ---------------------------------------------------------------------

    def replicated(self, step: int) -> None:
        """All copies of this node's pieces of that point are made."""
        self.stalls.replicated(step)
        with self._changed:
            self._replicated = max(self._replicated, step)
            self._changed.notify_all()

    # ---- at each step ---------------------------------------------------------------------------

    def is_kept(self, step: int) -> bool:
        """Is a snapshot taken when so many steps are done?"""
        return step % self.target.memory_every == 0 or self._is_persisted(step)

    def _is_persisted(self, step: int) -> bool:
        return self.target.persist_every is not None and step % self.target.persist_every == 0

    def wants_to_stop(self, step: int) -> bool:
        done = step + 1
        if self.is_kept(done):
            with self.stalls.stalled():
                self.writer.wait_copied()
            with self.stalls.stalled(is_late=True):
                self.writer.wait_sealed()
                if self.has_buddies and len(self._kept) > 1:
                    self._wait_replicated(self._kept[-2])
            with self.stalls.stalled(is_late=True):
                self._compare()  # It takes as long as the last of all ranks is late.
        return self.stop_at is not None and self.stop_at <= done

    def before_update(self) -> None:
        with self.stalls.stalled():
            self.writer.wait_copied()
        self.stalls.copied()

    def after_step(self) -> None:
        """Take a snapshot if it is time for one; the vote is over."""
        step = self.trainer.progress.step
        if self.is_kept(step):
            behind = 2 if self.has_buddies else 1
            if len(self._kept) >= behind:
                self._safe = self._kept[-behind]
            self.stalls.begun(step)
            with self.stalls.stalled():
                self._begin(persist=self._is_persisted(step))

    def _begin(self, *, persist: bool) -> None:
        self.writer.wait_sealed()  # Until then the memories are being copied.
        self.trainer.export_state()
        progress = progress_of(self.trainer)
        self.writer.begin(progress, persist=persist, safe_step=self._safe)
        self._kept.append(progress.step)

    def _compare(self) -> None:
        """See that all who hold a piece of the last point have sealed the same, if it is to last.

        Kinds of devices may round differently: those are compared that are of its writer's kind.
        """
        last = self.writer.sealed
        if last is None or not last.persist or last.step == self._compared:
            return
        kinds = _kinds_of(self.trainer.plan)
        mine = {
            piece.key: int(piece.checksum, 16) % DIGEST_END
            for piece in last.pieces
            if kinds[self.sharing.writers[piece.key]] == kinds[self.trainer.rank]
        }
        check_replicas(
            mine,
            sorted(self.sharing.holders),
            self.trainer.world_group,
            rank=self.trainer.rank,
            device=self.trainer.device,
            what=f"as it was sealed at step {last.step}",
        )
        self._compared = last.step

    def _wait_replicated(self, step: int) -> None:
        with self._changed:
            while self._replicated < step:
                self._changed.wait(_LOOK_S)
                self.transport.check()

    # ---- at the end -----------------------------------------------------------------------------

    def seal_at_stop(self, *, persist: bool) -> None:
        """All have stopped at one boundary: seal it."""
        step = self.trainer.progress.step
        if not self._kept or self._kept[-1] != step:
            self.writer.wait_sealed()
            if self._kept and self._all_agree(self._replicated >= self._kept[-1]):
                self._safe = self._kept[-1]
            self._begin(persist=persist or self._is_persisted(step))
        self.writer.wait_sealed()
        self._compare()

    def _all_agree(self, is_replicated: bool) -> bool:
        """Everybody is here, and so has sealed the last; are copies made of it, if they must be?"""
        group = self.trainer.world_group
        if group is None:
            return True
        missing = torch.zeros(1, device=self.trainer.device)
        missing[0] = float(self.has_buddies and not is_replicated)
        return not float(group.all_reduce(missing))

    def seal_what_is_whole(self) -> bool:
        """The others are lost: seal what was applied here, if there is room for it."""
        step = self.trainer.progress.step
        if self.trainer.update_complete and step not in self.writer.steps:
            self.writer.patience_s = 0.0
            try:
                self._begin(persist=False)
            except NoRoomError:
                return False
        self.writer.wait_sealed()
        return step in self.writer.steps

    def close(self) -> None:
        """Leave all that is sealed to the agent."""
        self.writer.close()
