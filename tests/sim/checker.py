"""Invariants of the simulated world, under any faults.

Each rule names its invariant of the protocol: one leader (I1), numbers and plans of generations
(I2), no effect of an ended generation's writes (I3), checkpoints (I4), steps lost by a restart
(I5, I6), devices (I12), last copies (I13), orders and notices (I16).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agents.protocol.records import (
    LIVE,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Order,
    Point,
    Sealed,
    Sealing,
)
from sailord.capacity.core.planner_view import progress_of
from sailord.core.model.phases import Closing, Opening, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.queries.drain_status import drained
from sailord.core.queries.forecast import at_risk
from sailord.core.queries.restore_choice import holders_reported

if TYPE_CHECKING:
    from sailord.core.model.state import State
    from tests.sim.machines import Machine
    from tests.sim.world import World

HEARD_S = 0.11
"""Where no message is lost, a report has arrived after this time."""
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


@dataclass
class Announced:
    """A survivor's announcement of a seal after a loss."""

    at: float
    step: int
    limit_s: float
    """How long the leader has to wait for it, and may."""


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
        self.commits = 0
        self.quarantined: set[NodeId] = set()
        self.undone = 0
        """Generations that began before the steps in which replicas differed."""
        self.announced: dict[tuple[JobId, int, NodeId], Announced] = {}
        self.chosen_at: dict[tuple[JobId, int], float] = {}
        """When the leader chose the restore point of a generation."""
        self.drained = 0
        """Decisions at which nodes were said to be safe to stop."""
        self.awaited = self.kept = 0
        """Decisions that awaited a seal, and generations that began from a step so sealed."""
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
        if before.term == after.term and before.nodes is not after.nodes:
            self.quarantined |= {
                id_ for id_, node in after.nodes.items() if node.exclusion.wrong_bits
            }
        if before.term != after.term:
            self.lines.append(Line(self.clock.now, f"{who}: term {before.term} -> {after.term}"))

        self._check_drained(after)
        self._check_wait(after)
        self._check_end(before, after)
        if after.term == self.term_max and _opening(after) not in (None, _opening(before)):
            opening = _opening(after)
            assert opening is not None
            self.chosen_at[opening.job, opening.number] = self.clock.now
            self._check_undone(before, opening)

    def _check_drained(self, state: State) -> None:
        """Check that nodes which are said to be safe to stop have no step that no other has."""
        away = drained(state) if state.term == self.term_max else frozenset()
        active = state.active
        up = {machine.id for machine in self.world.up()}
        known = {id_ for id_, node in state.nodes.items() if not node.is_lost}
        if not away or active is None or active.generation is None or not known <= up:
            return
        last = Opened(0.0, active.generation, active.generation, None)
        durable = state.durables.get(active.job)

        def newest(among: set[NodeId]) -> int:
            points = self.world.gangs.points_in_memory(active.job, among=among)
            found = [point.step for point in points if self._is_ancestor(point, last)]
            return max(found, default=0)

        self.drained += 1
        left, all_ = newest(up - away), newest(up)
        assert left >= all_ or (durable is not None and durable.point.step >= all_), (
            f"{sorted(away)} are said to be safe to stop, with step {all_}; the others have {left}"
        )

    def _check_undone(self, state: State, opening: GenerationRecord) -> None:
        """Check that no generation begins from steps in which replicas differed, if it need not."""
        assert state.active is not None
        last, durable = state.active.generation, state.durables.get(opening.job)
        if last is None or durable is None:
            return
        told = [r.agreed_at for _, r in state.reports_of(last) if r.agreed_at is not None]
        if not told or not self.world.objects.newest_readable(durable, min(told)):
            return
        is_undone = opening.restore.point.step <= min(told)
        self.undone += is_undone
        was_away = any(kind == "objects_away" for _, kind in self.faults)
        assert is_undone or was_away, f"{opening} begins after {min(told)}, the last right step"

    def _check_end(self, before: State, after: State) -> None:
        """Check that a job is done when its last step is durable, or was awaited long enough."""
        was, now = before.active, after.active
        if was is None or now is None or isinstance(was.phase, Closing):
            return
        if not isinstance(now.phase, Closing) or now.phase.then != "done":
            return
        job, durable = before.job, after.durables.get(was.job)
        if job.saving.uri is None or (durable and durable.point.step >= (job.steps or 0)):
            return
        wanted = was.checkpointing.securing
        assert wanted is not None and wanted.until <= after.now, (  # noqa: PT018 # one sentence
            f"{was.job} ends without its last step; durable: {durable}, awaited: {wanted}"
        )

    # ---- seals after a loss ---------------------------------------------------------------------

    def seal_announced(self, machine: Machine, record: GenerationRecord, sealing: Sealing) -> None:
        limit_s = self._limit_s(record, sealing, self.world.step_s)
        self.log(machine.id, f"seals step {sealing.step}, ready in {sealing.ready_in_s:.2f} s, "
                 f"awaited for {limit_s:.2f} s")  # fmt: skip
        made = Announced(self.clock.now, sealing.step, limit_s)
        self.announced[record.job, record.number, machine.id] = made

    def _limit_s(self, record: GenerationRecord, sealing: Sealing, step_s: float) -> float:
        """Return how long a seal is awaited: what it saves is worth at most the same steps."""
        kept = max(s for s in range(sealing.step) if s % record.memory_every == 0)
        steps = sealing.step - max(kept, record.restore.point.step)
        redo_s = steps * step_s
        if sealing.ready_in_s > max(redo_s, 1.0):
            return 0.0
        return max(min(2 * sealing.ready_in_s, redo_s), 1.0)

    def seal_done(self, machine: Machine, record: GenerationRecord, sealing: Sealing) -> None:
        """Check that the leader, if it had heard the announcement, waited for this."""
        self.log(machine.id, f"has sealed step {sealing.step}")
        made = self.announced[record.job, record.number, machine.id]
        chosen_at = self.chosen_at.get((record.job, record.number + 1))
        if self.world.faults.loss or chosen_at is None:
            return
        is_late = self.clock.now > made.at + made.limit_s
        assert is_late or chosen_at < made.at + HEARD_S, (
            f"the leader chose at {chosen_at:.2f}, and did not wait for {machine.id}: {made}"
        )

    def _check_wait(self, state: State) -> None:
        """Check that nothing but a seal that is worth it delays the next generation."""
        active = state.active
        if active is None or active.generation is None or state.term != self.term_max:
            return
        question, generation = active.question, active.generation
        is_answered = question is not None and isinstance(question.answer, Proposal)
        if not is_answered or not isinstance(active.phase, Waiting):
            return
        if holders_reported(state, active):
            return
        told = [(state.nodes[id_], r.sealing) for id_, r in state.reports_of(generation)]
        silent = {
            node.record.id: replace(node, report=replace(node.report, sealing=None))
            for node, sealing in told if sealing is not None and node.report is not None
        }  # fmt: skip
        if not silent or not holders_reported(
            replace(state, nodes=state.nodes.with_(silent)), active
        ):
            return
        self.awaited += 1
        # The leader's own measure of a step differs a little.
        step_s = 1.01 * max(self.world.step_s, active.progress.step_s or 0.0)
        ends = [
            (node.workers.sealing_since or 0.0) + self._limit_s(generation, sealing, step_s)
            for node, sealing in told
            if sealing is not None and not node.is_lost
        ]
        assert state.now < max(ends, default=0.0), f"a seal is awaited for too long: {silent}"

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
        self._check_apart(record)

    def _check_apart(self, record: GenerationRecord) -> None:
        """Check that no node is a member of open generations of two jobs that share."""
        if record.state == "closed" or not self.world.options.share:
            return
        for other in self._records.values():
            if other.job != record.job and other.state != "closed":
                both = set(record.members) & set(other.members)
                assert not both, f"{both} are members of {record.job} and of {other.job}"

    def _check_restore(self, opened: Opened) -> None:
        record, last, durable = opened.record, opened.last, opened.durable
        point = record.restore.point
        backs = {"checkpoint_damaged", "rollback", "wrong_bits"}
        is_back = any(kind in backs for _, kind in self.faults)
        if durable is not None and not is_back:
            assert point.step >= durable.point.step, f"durable steps are given up: {record}"
        if record.restore.source == "memory":
            done = [step for _, step in self.steps.get((record.job, point.generation), [])]
            first = self.opened[record.job, point.generation].record.restore.point
            assert point.step in (*done, first.step), f"{point} was never reached"
            assert self._is_ancestor(point, opened), f"{point} lies on a line that was left"
        if last is None:
            return
        reached = [step for _, step in self.steps.get((record.job, last.number), [])]
        lost = max([*reached, last.restore.point.step]) - point.step
        last_step_at = max(
            (at for at, _ in self.steps.get((record.job, last.number), [])), default=0
        )
        recent = [kind for when, kind in self.faults if last_step_at - PEACE_S <= when]
        if record.restore.source == "memory":
            self._check_kept(record, last)
        if last.state == "stopping" and not recent:
            assert lost <= 0, f"a planned change lost {lost} steps: {record}"
        if recent == ["power_off"]:
            assert lost <= 2 * last.memory_every, f"one lost machine cost {lost} steps: {record}"

    def _check_kept(self, record: GenerationRecord, last: GenerationRecord) -> None:
        """Check that a step which survivors had sealed before the leader chose is not lost."""
        chosen_at = self.chosen_at[record.job, record.number]
        point = record.restore.point
        sealed = [
            each.step
            for (job, number, _), each in self.announced.items()
            if (job, number) == (record.job, last.number)
        ]
        if point.generation == last.number and point.step in sealed:
            self.kept += 1
        if self.world.faults.loss or not sealed:
            return
        whole = self.world.gangs.points_in_memory(record.job, before=chosen_at - HEARD_S)
        lost = [p for p in whole if p.generation == last.number and p.step > point.step]
        assert not lost, f"{lost} was sealed when {record} was chosen at {chosen_at:.2f}"

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

    def check_release(
        self, machine: Machine, before: tuple[Sealed, ...], *, may_lose_one: bool = False
    ) -> None:
        """Check that releasing a snapshot did not take the last restore point.

        ``may_lose_one``: nor the last one if any one machine is lost.
        """
        job = machine.job
        assert job is not None, "snapshots of no job"
        up = {each.id for each in self.world.up()}
        losses = [up, *(up - {id_} for id_ in sorted(up) if may_lose_one)]
        stuck = [among for among in losses if not self._can_go_on(job, among)]
        after, machine.sealed = machine.sealed, before
        freed = [sorted(up - among) for among in stuck if self._can_go_on(job, among)]
        machine.sealed = after
        assert not freed, f"{machine.id} freed the last copy: {before} to {after}, after {freed}"

    def check_deleted(self, machine: NodeId, job: JobId) -> None:
        """Check that a node which left a job for another one did not take the last copy along."""
        if self._jobs[job].state in LIVE and job in self._records:
            assert self._can_go_on(job), f"{machine} deleted the last copy of {job}"

    def _can_go_on(self, job: JobId, among: Container[NodeId] | None = None) -> bool:
        record = self._records[job]
        gangs, objects = self.world.gangs, self.world.objects
        durable = self._durables.get(job)
        points = gangs.points_in_memory(job, among=among)
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
        record, durable = self._records.get(job.id), self._durables.get(job.id)
        if record is None:
            return
        kept = 0 if durable is None else durable.point.step
        last = Opened(0.0, record, record, None)
        heads = self.world.heads.values()
        state = max((head.state for head in heads), key=lambda each: each.term or 0)
        if job.id in state.rollbacks:
            return  # An operator gave those steps up: it begins at an older one when it is resumed.
        known = {id_ for id_, node in state.nodes.items() if not node.is_lost}
        points = self.world.gangs.points_in_memory(job.id, among=known)
        lost = [p for p in points if p.step > kept and self._is_ancestor(p, last)]
        assert not lost, f"{job.id} gave the cluster away with {lost} in memory alone"

    def account(self) -> str:
        return "\n".join(f"{line.at:8.2f} {line.text}" for line in self.lines)


def _opening(state: State) -> GenerationRecord | None:
    """Return the record that is being stored."""
    phase = None if state.active is None else state.active.phase
    return phase.record if isinstance(phase, Opening) else None
