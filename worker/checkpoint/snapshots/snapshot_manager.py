"""Decides when a rank takes snapshots, what it waits for, and which older ones it still needs.

Which steps are kept is a function of the step, so all ranks keep the same ones. A rank votes on
such a step only after it has sealed its last snapshot and, where replicas are needed, its agent has
replicated the one before that or given up. So a completed vote tells every rank which points are
complete on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.capacity_check import check_room, node_need
from worker.checkpoint.compatibility import dtype_of, model_of
from worker.checkpoint.load_state import (
    bit_sums,
    derive_weights,
    fill_piece,
    progress_from,
    saved_progress,
)
from worker.checkpoint.placement import (
    PieceKey,
    SnapshotPlacement,
    nodes_of,
    placement_of,
    state_shape,
)
from worker.checkpoint.snapshot_file import (
    UNKNOWN,
    Header,
    NoRoomError,
    Piece,
    SavedProgress,
    with_offsets,
)
from worker.checkpoint.snapshots.replica_check import check_replicas
from worker.checkpoint.snapshots.snapshot_writer import CopySources, OnMilestone, SnapshotWriter
from worker.checkpoint.snapshots.stall_stats import StallStats
from worker.distributed.interface import Transport
from worker.engines.interface import TrainingEngine
from worker.layout.rank_layout import Holdings, rank_places
from worker.training.snapshot_hook import ReplicaMismatchError

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SnapshotTarget:
    """What a rank knows from its agent about its snapshots."""

    job: str
    generation: int
    term: int
    node: str
    memory: Path
    memory_every: int
    persist_every: int | None
    zones: Mapping[str, str]
    """The zone of every known node."""
    needed: frozenset[tuple[int, int]] | None = None
    """Generation and step of the points of past generations that this one may need; the agent
    deletes others when room is short. ``None``: all."""


def check_node(job: Job, plan: Plan, holdings: Holdings, target: SnapshotTarget) -> bool:
    """Return whether the node's memory has room for all files of its ranks at once.

    Raises ``NoRoomError`` if it cannot hold the snapshots of its ranks.
    """
    need = node_need(placement_of(job, plan, holdings, target.zones), target.node)
    return check_room(need, target.memory, target.job, target.generation, target.needed)


def header_of(trainer: TrainingEngine, target: SnapshotTarget) -> tuple[Header, SnapshotPlacement]:
    """Return the header template of a rank's files, and the placement."""
    shape = state_shape(trainer.job)
    placement = placement_of(trainer.job, trainer.plan, trainer.holdings, target.zones)
    pieces = tuple(
        Piece(
            *key,
            offset=0,
            bytes=placement.sizes[key],
            is_written=placement.writers[key] == trainer.rank,
            buddy=placement.buddies.get(key) if placement.writers[key] == trainer.rank else None,
            weights_checksum=UNKNOWN if trainer.job.zero else "",
        )
        for key, ranks in placement.holders.items()
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
        progress=saved_progress(trainer.progress),
        pieces=pieces,
    )
    return with_offsets(header), placement


def load_piece(trainer: TrainingEngine, key: PieceKey, body: bytearray | memoryview) -> None:
    """Copy a fetched piece into the trainer's buffers."""
    fill_piece(trainer.buffers, key, body, state_shape(trainer.job))


def continue_from(trainer: TrainingEngine, saved: SavedProgress) -> None:
    """Continue from a snapshot all of whose pieces were copied."""
    derive_weights(trainer.buffers, trainer.precision)
    progress = progress_from(saved).on(trainer.progress)
    scale = progress.scale.restored(trainer.precision, trainer.job)
    trainer.progress = replace(progress, scale=scale)
    trainer.import_state()


def check_state(trainer: TrainingEngine) -> None:
    """Check that all holders have the same state; also the first message on each connection."""
    shape = state_shape(trainer.job)
    keys, sums = bit_sums(trainer.buffers, shape, zero=trainer.job.zero)
    check_replicas(
        _by_key(keys, sums),
        sorted(shape.keys),
        trainer.world_group,
        nodes=nodes_of(trainer.plan),
        device=trainer.device,
        what="as restored",
        blames=False,
    )


def _by_key(keys: list[PieceKey], sums: torch.Tensor | None) -> dict[PieceKey, int]:
    return dict(zip(keys, [] if sums is None else sums.tolist(), strict=True))


@dataclass(eq=False)
class SnapshotManager:
    """One rank's snapshots of one generation, and its request to stop."""

    trainer: TrainingEngine
    target: SnapshotTarget
    writer: SnapshotWriter
    transport: Transport
    stalls: StallStats
    placement: SnapshotPlacement
    stop_at: int | None = None
    """All ranks stop at the end of this step; if it has ended already, at the end of the next."""
    _kept: list[int] = field(default_factory=list)
    """The steps of which this generation has taken snapshots."""
    _safe: int = 0
    """Snapshots before this step are no longer needed."""
    _replicated: int = -1
    _noted: tuple[int, list[PieceKey], torch.Tensor | None] | None = None
    """A step and the sums of this rank's bits after it, until they are compared."""
    _compared: int = 0
    """The last step whose bits are compared; the first ones were compared as the generation
    opened."""
    _agreed_at: int = 0
    """The last step of which it is known that all holders had the same bits."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def open(
        cls,
        trainer: TrainingEngine,
        target: SnapshotTarget,
        transport: Transport,
        *,
        on_sealed: Callable[[int], None] = lambda _: None,
        on_milestone: OnMilestone = lambda _: None,
        on_no_room: Callable[[int, int], None] = lambda *_: None,
        all_at_once: bool = True,
    ) -> Self:
        """Reserve room for all snapshot files that will exist at once, or only for the first.

        ``on_no_room`` gets the needed bytes, and the last step whose snapshot is known to be
        complete on all ranks, so that no older point is needed; 0: there is none.
        """
        header, placement = header_of(trainer, target)
        sources = CopySources.of(header, trainer.buffers)
        stalls = StallStats(placement.waits)

        def sealed(step: int) -> None:
            stalls.sealed(step)
            on_sealed(step)

        def lacks_room(needed_bytes: int, safe_step: int) -> None:
            # A replica that was given up is on no other node, but one of an older point may be.
            is_safe = not placement.waits and target.needed is not None
            on_no_room(needed_bytes, safe_step if is_safe else 0)

        writer = SnapshotWriter(target.memory, header, sources, sealed, on_milestone, lacks_room)
        more = placement.files - placement.first_files if all_at_once else 0
        writer.reserve(placement.first_files, more)
        found = cls(trainer, target, writer, transport, stalls, placement)
        found._compared = found._agreed_at = trainer.progress.step
        return found

    # ---- from other threads ---------------------------------------------------------------------

    def replicated(self, step: int) -> None:
        """Record that this rank's replicas of that step are stored, or were given up."""
        self.stalls.replicated(step)
        with self._changed:
            self._replicated = max(self._replicated, step)
            self._changed.notify_all()

    # ---- at each step ---------------------------------------------------------------------------

    def is_kept(self, step: int) -> bool:
        """Return whether a snapshot is taken once ``step`` steps are done."""
        return step % self.target.memory_every == 0 or self._is_persisted(step)

    def _is_persisted(self, step: int) -> bool:
        return self.target.persist_every is not None and step % self.target.persist_every == 0

    def wants_to_stop(self, step: int) -> bool:
        """Return this rank's vote before it makes a step: whether the generation ends with that
        step.

        If a snapshot follows the step, wait first until the last one is sealed and, where copies on
        other nodes are needed, the one before it is replicated. If bits were noted, compare them.
        """
        done = step + 1
        if self.is_kept(done) or self._noted is not None:
            with self.trainer.recorder.span("snapshot"):
                if self.is_kept(done):
                    self._wait_for_the_last()
                self._compare()
        return self.stop_at is not None and self.stop_at <= done

    def _wait_for_the_last(self) -> None:
        with self.stalls.stalled():
            self.writer.wait_copied()
        with self.stalls.stalled(is_late=True):
            self.writer.wait_sealed()
            if self.placement.waits and len(self._kept) > 1:
                with self._changed:
                    while self._replicated < self._kept[-2]:
                        self._changed.wait(_POLL_S)
                        self.transport.check()

    def before_update(self) -> None:
        with self.stalls.stalled():
            self.writer.wait_copied()
        self.stalls.copied()

    def after_step(self) -> None:
        """Take a snapshot if one is due; called after the vote."""
        step = self.trainer.progress.step
        if self.is_kept(step):
            behind = 2 if self.placement.waits else 1
            if len(self._kept) >= behind:
                self._safe = self._kept[-behind]
            self.stalls.begun(step)
            with self.stalls.stalled():
                self._begin(persist=self._is_persisted(step))
        if self._is_to_compare(step):
            self._note_bits()

    def before_giving_up(self) -> None:
        """Compare the bits of all holders: a wrong one may be why a number is not finite."""
        if self.trainer.buffers_are_live:
            self._note_bits()
            self._compare()

    def _is_to_compare(self, step: int) -> bool:
        every = self.trainer.job.checkpoint.compare_every
        is_due = self._is_persisted(step) or (0 < every <= step - self._compared)
        return is_due and (self.trainer.buffers_are_live or self.is_kept(step))

    def _note_bits(self) -> None:
        """Sum this rank's bits, on the device and without waiting for it."""
        trainer = self.trainer
        if trainer.world_group is None:
            return
        self._compared = trainer.progress.step
        sums = bit_sums(trainer.buffers, state_shape(trainer.job), zero=trainer.job.zero)
        self._noted = self._compared, *sums

    def _begin(self, *, persist: bool) -> None:
        self.writer.wait_sealed()  # The buffers are being copied until then.
        self.trainer.export_state()
        progress = saved_progress(self.trainer.progress)
        self.writer.begin(progress, persist=persist, safe_step=self._safe)
        self._kept.append(progress.step)

    def _compare(self) -> None:
        """Check that all holders had the same bits when they were noted.

        That includes holders that keep no snapshot of the piece, since one that has drifted trains
        with wrong weights. GPU kinds may round differently, so only holders with the GPU kind of a
        piece's writer are compared.
        """
        if self._noted is None:
            return
        step, keys, sums = self._noted
        self._noted = None
        plan = self.trainer.plan
        kinds = {
            each.rank: plan.pipelines[each.pipeline].stages[each.stage].places[0].gpu
            for each in rank_places(plan)
        }
        own = kinds[self.trainer.rank]
        mine = {
            key: bits
            for key, bits in _by_key(keys, sums).items()
            if kinds[self.placement.writers[key]] == own
        }
        try:
            check_replicas(
                mine,
                sorted(self.placement.holders),
                self.trainer.world_group,
                nodes=self.placement.nodes,
                device=self.trainer.device,
                what=f"after {step} steps",
            )
        except ReplicaMismatchError as error:
            text = str(error)
            if any(keeps_alone(self.placement, rank, error) for rank in error.blamed):
                text += "; its snapshots stay, since no other rank keeps all of their pieces"
            raise ReplicaMismatchError(
                text, blamed=error.blamed, keys=error.keys, agreed_at=self._agreed_at
            ) from None
        self._agreed_at = step

    # ---- at a stop -------------------------------------------------------------------------------

    def seal_at_stop(self, *, persist: bool) -> None:
        """Seal the state after all ranks have stopped at the same step."""
        step = self.trainer.progress.step
        if not self._kept or self._kept[-1] != step:
            self.writer.wait_sealed()
            if self._kept and self._all_replicated(self._replicated >= self._kept[-1]):
                self._safe = self._kept[-1]
            self._begin(persist=persist or self._is_persisted(step))
        if self._noted is None:
            self._note_bits()
        self.writer.wait_sealed()
        self._compare()

    def _all_replicated(self, is_replicated: bool) -> bool:
        """Return whether all ranks have replicated the last snapshot, if replicas are needed."""
        group = self.trainer.world_group
        if group is None:
            return True
        missing = torch.zeros(1, device=self.trainer.device)
        missing[0] = float(self.placement.waits and not is_replicated)
        return group.read_sum(missing) == [0.0]

    def expected_seal(
        self, *, rolls_forward: bool, lost: frozenset[int]
    ) -> tuple[int, float] | None:
        """Return which step ``seal_if_complete`` seals and the expected seconds; ``None``: nothing.

        A seal that only begins now is not worth it if ``lost`` ranks alone keep some piece. One
        that is under way is: they may have sealed it, too.
        """
        trainer, writer = self.trainer, self.writer
        step = trainer.progress.step + int(rolls_forward)
        is_new = trainer.update_complete and step not in writer.steps
        if is_new and not any(lost.issuperset(each) for each in self.placement.holders.values()):
            return step, writer.left_s + writer.seal_s
        return (max(writer.steps), writer.left_s) if writer.left_s else None

    def seal_if_complete(self) -> bool:
        """Seal the state after a loss, if its last update is complete and there is room."""
        step = self.trainer.progress.step
        if self.trainer.update_complete and step not in self.writer.steps:
            self.writer.room_wait_s = 0.0
            try:
                self._begin(persist=False)
            except NoRoomError:
                return False
        self.writer.wait_sealed()
        return step in self.writer.steps

    def withdraw_if_blamed(self, error: ReplicaMismatchError) -> bool:
        """Withdraw this rank's snapshots if they hold contradicted bits; return whether it did.

        The next generation takes what other ranks keep. If some piece is kept by no rank that is
        not blamed, the snapshots stay: a state with a wrong bit is worth more than none.
        """
        rank, holders = self.trainer.rank, self.placement.holders
        mine = {key for key in holders if rank in holders[key]}
        is_wrong = rank in error.blamed and not mine.isdisjoint(error.keys)
        if not is_wrong or keeps_alone(self.placement, rank, error):
            return False
        self.writer.withdraw()
        return True

    def close(self) -> None:
        """Close the files; sealed ones now belong to the agent."""
        self.writer.close()


def keeps_alone(placement: SnapshotPlacement, rank: int, error: ReplicaMismatchError) -> bool:
    """Return whether a rank keeps a wrong piece, and some piece that no rank keeps rightly.

    Empty pieces count: a point without them does not.
    """
    holders = placement.holders
    mine = {key for key in holders if rank in holders[key]}
    return bool(mine.intersection(error.keys)) and any(
        set(error.blamed).issuperset(holders[key]) for key in mine
    )
