"""Invariants of the simulated world, under any faults.

Each rule names its invariant of the protocol: one leader (I1), numbers and plans of generations
(I2), no effect of an ended generation's writes (I3), checkpoints (I4), steps lost by a restart
(I5, I6), devices (I12), last copies (I13), orders and notices (I16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    Order,
    Point,
    Sealed,
)
from sailord.capacity.core.planner_view import progress_of
from sailord.core.queries.forecast import at_risk

if TYPE_CHECKING:
    from sailord.core.model.state import State
    from tests.sim.machines import Machine
    from tests.sim.world import World

PEACE_S = 40.0
"""Time within which the effects of a fault may appear, in seconds."""


@dataclass(frozen=True)
class Line:
    """One line of the account that a failing seed prints."""

    at: float
    text: str


@dataclass(frozen=True)
class Opened:
    """A generation as it was opened, and the durable checkpoint at that time."""

    at: float
    record: GenerationRecord
    last: GenerationRecord | None
    durable: Durable | None


class Checker:
    """Observes every decision, step and write."""

    def __init__(self, world: World) -> None:
        self.world, self.clock, self.store = world, world.clock, world.store
        self.store.changed = self.stored
        self.lines: list[Line] = []
        self.steps: dict[tuple[JobId, int], list[tuple[float, int]]] = {}
        self.faults: list[tuple[float, str]] = []
        self.opened: dict[tuple[JobId, int], Opened] = {}
        self.failures_max = self.term_max = 0
        self.pids = 0
        self.commits = self.yields = 0
        self._records: dict[JobId, GenerationRecord] = {}
        self._durables: dict[JobId, Durable] = {}
        self._jobs: dict[JobId, JobRecord] = {}
        self._pauses = {"ordered": 0, "done": 0}

    # ---- observations ---------------------------------------------------------------------

    def next_pid(self) -> int:
        self.pids += 1
        return self.pids

    def log(self, who: str, text: str) -> None:
        self.lines.append(Line(self.clock.now, f"{who}: {text}"))

    def log_fault(self, fault: str) -> None:
        self.faults.append((self.clock.now, fault.split(maxsplit=1)[0]))
        self.lines.append(Line(self.clock.now, f"---- {fault}"))

    def step_done(self, record: GenerationRecord, step: int) -> None:
        self.steps.setdefault((record.job, record.number), []).append((self.clock.now, step))

    def decided(self, who: str, before: State, after: State) -> None:
        # A thawed head may still consider itself the leader; its writes are fenced off.
        self.term_max = max(self.term_max, after.term or 0)
        if after.active is not None and after.term == self.term_max:
            self.failures_max = max(self.failures_max, after.active.attempts.failures)
        if before.term != after.term:
            self.lines.append(Line(self.clock.now, f"{who}: term {before.term} -> {after.term}"))

    def forecast(self, state: State) -> None:
        """Check what is told of the job's deadline, and what is rented by: its progress."""
        at_risk(state)
        found = progress_of(state)
        if found is None:
            return
        assert found.step >= 0
        assert found.redo_s >= 0
        assert found.slower > 0
        assert found.is_running + (found.starting_since is not None) <= 1
        if found.starting_since is not None:
            assert found.starting_since <= state.now

    def stored(self, key: str, value: object) -> None:
        """Check one write to the store; called in the order of writes."""
        match value:
            case GenerationRecord():
                self._record(value)
            case Durable():
                self._durable(JobId(key.split("/")[2]), value)
            case JobRecord():
                self._job(value)
            case Order(kind="pause"):
                self._pauses["ordered"] += 1
            case _:
                pass

    # ---- generations ----------------------------------------------------------------------

    def _record(self, record: GenerationRecord) -> None:
        last = self._records.get(record.job)
        others = [each.term for each in self._records.values()]
        assert record.term >= max(others, default=0), f"terms interleave: {record}"
        if record.state == "open":
            assert record.number == (1 if last is None else last.number + 1), (
                f"out of turn: {record}"
            )
            durable = self._durables.get(record.job)
            opened = Opened(self.clock.now, record, last, durable)
            self.opened[record.job, record.number] = opened
            self._check_restore(opened)
        else:
            assert last is not None, f"the first one of a job is not open: {record}"
            same = (last.number, last.plan, last.members, last.restore)
            assert same == (record.number, record.plan, record.members, record.restore), record
        self._records[record.job] = record

    def _check_restore(self, opened: Opened) -> None:
        record, last, durable = opened.record, opened.last, opened.durable
        point = record.restore.point
        is_back = any(kind in {"checkpoint_damaged", "rollback"} for _, kind in self.faults)
        if durable is not None and not is_back:
            assert point.step >= durable.point.step, f"durable steps are given up: {record}"
        if record.restore.source == "memory":
            done = [step for _, step in self.steps.get((record.job, point.generation), [])]
            first = self.opened[record.job, point.generation].record.restore.point
            assert point.step in done or point == first, f"{point} was never reached"
            assert self._is_ancestor(point, opened), f"{point} lies on a line that was left"
        if last is None:
            return
        reached = [step for _, step in self.steps.get((record.job, last.number), [])]
        lost = max([*reached, last.restore.point.step]) - point.step
        last_step_at = max(
            (at for at, _ in self.steps.get((record.job, last.number), [])), default=0
        )
        recent = [kind for when, kind in self.faults if last_step_at - PEACE_S <= when]
        if last.state == "stopping" and not recent:
            assert lost <= 0, f"a planned change lost {lost} steps: {record}"
        if recent == ["power_off"]:
            assert lost <= 2 * last.memory_every, f"one lost machine cost {lost} steps: {record}"

    def _is_ancestor(self, point: Point, opened: Opened) -> bool:
        """Return whether the point is an ancestor in the true history of generations."""
        end = float("inf")
        job, number = opened.record.job, 0 if opened.last is None else opened.last.number
        while (job, number) in self.opened:
            if point.generation == number:
                return point.step <= end
            restore = self.opened[job, number].record.restore
            end = min(end, restore.point.step)
            number = restore.point.generation
        return False

    # ---- checkpoints ----------------------------------------------------------------------

    def _durable(self, job: JobId, durable: Durable) -> None:
        record, before = self._records[job], self._durables.get(job)
        self._durables[job] = durable
        begins = record.state == "open" and record.restore.point == durable.point
        if begins and record.restore.source == "durable":
            return  # A rollback: its generation restores this older checkpoint.
        objects = self.world.objects
        if before is not None and objects.newest_readable(before) == durable != before:
            # The newest was found damaged when a generation began, which had later steps in memory.
            assert record.restore.point.step > durable.point.step, f"{before} to {durable}"
            return
        self.commits += 1
        assert durable.point.generation == record.number, f"{durable} is a dead generation's"
        assert record.state != "closed", f"{durable} came after the end of its generation"
        assert before is None or durable.point.step > before.point.step, f"{before} to {durable}"
        assert self.world.objects.is_whole(durable), f"{durable} was committed and is not whole"

    def check_release(self, machine: Machine, before: tuple[Sealed, ...]) -> None:
        """Check that releasing a snapshot did not take the last restore point."""
        job = machine.job
        assert job is not None, "snapshots of no job"
        if self._can_go_on(job):
            return
        after, machine.sealed = machine.sealed, before
        assert not self._can_go_on(job), f"{machine.id} freed the last copy: {before} to {after}"
        machine.sealed = after

    def _can_go_on(self, job: JobId) -> bool:
        record = self._records[job]
        gangs, objects = self.world.gangs, self.world.objects
        durable = self._durables.get(job)
        points = gangs.points_in_memory(job)
        return (
            any(self._is_ancestor(point, Opened(0.0, record, record, None)) for point in points)
            or (durable is not None and objects.newest_readable(durable) is not None)
            or (durable is None and record.restore.source == "start")
        )

    # ---- jobs -----------------------------------------------------------------------------

    def _job(self, job: JobRecord) -> None:
        before = self._jobs.get(job.id)
        self._jobs[job.id] = job
        if before is not None and before.state == "held" and "; held: " in job.reason:
            self._check_yield(job)
        elif job.state == "paused" and (before is None or before.state != "paused"):
            self._pauses["done"] += 1
        if job.state == "done":
            record = self._records[job.id]
            done = [step for _, step in self.steps.get((job.id, record.number), [])]
            reached = max([*done, record.restore.point.step])
            assert job.steps is not None and reached >= job.steps, f"done at {reached}: {job}"  # noqa: PT018 # one sentence
        assert self._pauses["done"] <= self._pauses["ordered"], "a pause took effect twice"

    def _check_yield(self, job: JobRecord) -> None:
        """Check that a held job lost no step to the next one that a known, living node holds."""
        self.yields += 1
        record, durable = self._records.get(job.id), self._durables.get(job.id)
        if record is None:
            return
        kept = 0 if durable is None else durable.point.step
        last = Opened(0.0, record, record, None)
        heads = self.world.heads.values()
        state = max((head.state for head in heads), key=lambda each: each.term or 0)
        known = {id_ for id_, node in state.nodes.items() if not node.is_lost}
        points = self.world.gangs.points_in_memory(job.id, among=known)
        lost = [p for p in points if p.step > kept and self._is_ancestor(p, last)]
        assert not lost, f"{job.id} gave the cluster away with {lost} in memory alone"

    def account(self) -> str:
        return "\n".join(f"{line.at:8.2f} {line.text}" for line in self.lines)
