"""Checkpoints: commit, release of snapshots, and restore."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import (
    Bill,
    Durable,
    Fence,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
    Restore,
    Saving,
    Sealed,
    Uploaded,
)
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.model.commands import (
    CheckDurable,
    CollectGarbage,
    CommitCheckpoint,
    Note,
    RequestPlan,
    SettleOrder,
    WriteGeneration,
    WriteManifest,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    CommitFailed,
    DurableChecked,
    Elected,
    GenerationWritten,
    ManifestWritten,
    NodesObserved,
    OrderGiven,
    PlanFound,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Held, Opening, Running, Stopping
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import State
from sailord.core.queries.report_reply import answer_to
from sailord.core.queries.restore_choice import release_now
from sailord.core.rules.checkpoint_rules import covering

JOB = JobId("job")
A, B = NodeId("a"), NodeId("b")
LAYERS, PIECES = 2, 3
RECORD = GenerationRecord(JOB, 3, "open", "plan", (A, B), Restore(Point(10, 2), "memory"), 5, "why")


class World:
    """A controller that runs a job on two nodes, and what it orders."""

    def __init__(self, *, steps=None, uri="file:///x", durable=None):
        saving = Saving(uri, 1, 5)
        job = JobRecord(JOB, "running", steps=steps, layers=LAYERS, atoms=PIECES, saving=saving)
        self.at, self.numbers = 0.0, {A: 0, B: 0}
        self.state, self.orders = State(), []
        durables = () if durable is None else ((JOB, durable),)
        known = {"jobs": (job,), "generations": (RECORD,), "durables": durables}
        self.tell(Elected, 5, nodes=self.nodes(A, B), **known)
        self.report(A, "running", 10)
        self.report(B, "running", 10)
        self.orders.clear()
        assert isinstance(self.state.active.phase, Running)

    def nodes(self, *ids):
        return tuple(NodeRecord(i, i, "z", "m", "g", 1, i, "ready") for i in ids)

    def tell(self, kind, *args, **more):
        self.at += 0.1
        before = self.state
        self.state, commands = decide(before, kind(self.at, *args, **more))
        invariants.check(before, self.state, commands)
        self.orders += commands
        return commands

    def report(self, node, taking, step, *, sealed=(), uploaded=(), generation=3):
        self.numbers[node] = self.numbers.get(node, 0) + 1
        return self.tell(
            Reported,
            Report(
                node, self.numbers[node], Fence(5, 3), generation, taking, step,
                tuple(sealed), job=JOB, uploaded=tuple(uploaded),
            ),
        )  # fmt: skip

    def ordered(self, kind):
        found = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return found


def upload(step, layer, first, end, *, generation=3, name=""):
    holds = (Holding(layer, first, end),)
    uri = f"file:///x/job/{generation}-{step}/{name or f'{layer}.{first}'}"
    return Uploaded(Point(step, generation), uri, 9, "c", holds)


def whole(step, generation=3):
    """Return both nodes' uploads of a step: a layer each."""
    return [upload(step, layer, 0, PIECES, generation=generation) for layer in range(LAYERS)]


def durable(step, generation=3, name="m"):
    return Durable(Point(step, generation), f"{name}-{step}", "sha")


def seal(step, *layers, generation=3):
    return Sealed(Point(step, generation), tuple(Holding(n, 0, PIECES) for n in layers))


def commit(world, step):
    """Take a step through both phases."""
    first, second = whole(step)
    world.report(A, "running", step, uploaded=[first])
    world.report(B, "running", step, uploaded=[second])
    (described,) = world.ordered(WriteManifest)
    assert described.point.step == step
    world.tell(ManifestWritten, JOB, durable(step))
    (order,) = world.ordered(CommitCheckpoint)
    world.tell(CheckpointCommitted, JOB, order.durable)


# ---- what covers everything once ----------------------------------------------------------------


def test_objects_must_cover_every_piece_exactly_once():
    def cover(*uploads):
        found = covering(uploads, layers=LAYERS, atoms=PIECES)
        return None if found is None else {each.uri for each in found}

    a, b = whole(5)
    assert cover(a, b) == {a.uri, b.uri}
    assert cover(a) is None
    assert cover(a, upload(5, 1, 0, 2)) is None
    assert cover(a, upload(5, 1, 0, 2), upload(5, 1, 2, 3)) is not None
    twice = upload(5, 1, 0, PIECES, name="zz")
    assert cover(a, b, twice) == {a.uri, b.uri}
    assert cover(a, b, upload(5, 2, 0, PIECES)) is None, "a layer that the job does not have"


# ---- committing ---------------------------------------------------------------------------------


def test_checkpoint_gets_manifest_commit_and_garbage_collection():
    world = World()
    first, second = whole(15)
    world.report(A, "running", 15, uploaded=[first])
    assert world.ordered(WriteManifest) == []
    world.report(B, "running", 15, uploaded=[second])
    (order,) = world.ordered(WriteManifest)
    assert (order.point, set(order.parts)) == (Point(15, 3), {first, second})
    assert order.record == RECORD
    assert order.parent is None
    world.tell(Ticked)
    assert world.ordered(WriteManifest) == [], "once is enough"
    world.tell(ManifestWritten, JOB, durable(15))
    assert world.ordered(CommitCheckpoint) == [CommitCheckpoint(durable(15), RECORD)]
    assert world.ordered(CollectGarbage) == []
    world.tell(CheckpointCommitted, JOB, durable(15))
    assert world.state.durables[JOB] == durable(15)
    (swept,) = world.ordered(CollectGarbage)
    assert swept.durable == durable(15)


def test_commits_are_in_order_and_each_names_its_parent():
    world = World()
    world.report(A, "running", 20, uploaded=[whole(20)[0], whole(15)[0]])
    world.report(B, "running", 20, uploaded=[whole(20)[1], whole(15)[1]])
    (order,) = world.ordered(WriteManifest)
    assert order.point.step == 15
    world.tell(ManifestWritten, JOB, durable(15))
    world.tell(CheckpointCommitted, JOB, durable(15))
    (order,) = world.ordered(WriteManifest)
    assert (order.point.step, order.parent) == (20, durable(15))


@pytest.mark.parametrize("generation", [2, 4])
def test_uploads_of_another_generation_never_count(generation):
    world = World()
    world.report(A, "running", 15, uploaded=whole(15, generation))
    assert world.ordered(WriteManifest) == []


def test_uploads_of_a_node_that_died_still_count():
    world = World()
    world.report(B, "running", 15, uploaded=whole(15)[1:])
    world.report(A, "running", 15, uploaded=whole(15)[:1])
    world.tell(NodesObserved, world.nodes(A))
    assert world.ordered(WriteManifest)


def test_failed_commit_is_retried_and_reported():
    world = World()
    world.report(A, "running", 15, uploaded=whole(15))
    world.ordered(WriteManifest)
    world.tell(CommitFailed, JOB, Point(15, 3), "the storage is full")
    assert world.ordered(WriteManifest) == []
    assert world.state.active.checkpointing.trouble == "the storage is full"
    world.at += world.state.options.commit_pause_s
    world.tell(Ticked)
    assert world.ordered(WriteManifest)
    world.tell(ManifestWritten, JOB, durable(15))
    world.tell(CheckpointCommitted, JOB, durable(15))
    assert world.state.active.checkpointing.trouble == ""


# ---- what may be forgotten ----------------------------------------------------------------------


def test_point_is_released_once_it_survives_a_node():
    world = World()
    world.report(A, "running", 12, sealed=[seal(11, 0, 1), seal(12, 0, 1)])
    assert release_now(world.state) is None
    world.report(B, "running", 12, sealed=[seal(11, 0, 1), seal(12, 1)])
    assert release_now(world.state) == Point(11, 3)
    world.report(B, "running", 12, sealed=[seal(11, 0, 1), seal(12, 0, 1)])
    assert release_now(world.state) == Point(12, 3)


def test_of_another_generations_snapshots_only_the_restore_point_releases_older_ones():
    world = World()
    for node in (A, B):
        world.report(node, "running", 12, sealed=[seal(11, 0, 1, generation=2)])
    assert release_now(world.state) is None
    for node in (A, B):
        world.report(node, "running", 12, sealed=[seal(10, 0, 1, generation=2)])
    assert release_now(world.state) == Point(10, 2)


def test_committed_point_needs_no_replica():
    world = World()
    commit(world, 15)
    assert release_now(world.state) == Point(15, 3)


def test_reply_is_about_the_reports_own_job():
    world = World()
    report = world.state.nodes[A].report
    answer = answer_to(world.state, report, Point(12, 3))
    assert (answer.term, answer.release, answer.upload) == (5, Point(12, 3), None)
    assert answer_to(world.state, replace(report, job=JobId("x")), Point(12, 3)).release is None


# ---- now, and before the end --------------------------------------------------------------------


def test_ordered_checkpoint_is_the_newest_complete_snapshot():
    world = World()
    world.tell(OrderGiven, Order("i", "checkpoint", JOB))
    world.report(A, "running", 12, sealed=[seal(12, 0)])
    assert world.state.active.checkpointing.securing is None
    world.report(B, "running", 12, sealed=[seal(12, 1)])
    report = world.state.nodes[A].report
    assert answer_to(world.state, report, Point(13, 3)).upload == Point(12, 3)
    world.report(A, "running", 13, sealed=[seal(13, 0, 1)], uploaded=whole(12))
    assert release_now(world.state) is None, "what is uploaded must stay"
    world.tell(ManifestWritten, JOB, durable(12))
    world.tell(CheckpointCommitted, JOB, durable(12))
    assert world.ordered(SettleOrder) == [SettleOrder("i")]
    assert answer_to(world.state, report, None).upload is None


def test_ordered_checkpoint_does_not_delay_other_orders():
    world = World()
    world.tell(OrderGiven, Order("i", "checkpoint", JOB))
    world.tell(OrderGiven, Order("k", "replan", JOB))
    assert world.ordered(RequestPlan)


def test_ordered_checkpoint_without_a_uri_is_answered_at_once():
    world = World(uri=None)
    world.tell(OrderGiven, Order("i", "checkpoint", JOB))
    assert world.ordered(SettleOrder) == [SettleOrder("i")]
    assert "names no place" in world.ordered(Note)[-1].text


def end(world, step=20):
    for node in (A, B):
        world.report(node, "stopped", step, sealed=[seal(step, 0, 1)])


def test_a_job_is_done_once_its_last_step_is_durable():
    world = World(steps=20)
    end(world)
    assert world.ordered(WriteGeneration) == []
    assert world.state.active.checkpointing.securing.point == Point(20, 3)
    world.report(A, "stopped", 20, sealed=[seal(20, 0, 1)], uploaded=whole(20))
    world.tell(ManifestWritten, JOB, durable(20))
    world.tell(CheckpointCommitted, JOB, durable(20))
    (closed,) = world.ordered(WriteGeneration)
    assert (closed.record.state, closed.record.reason) == ("closed", "all 20 steps are done")


def test_seals_of_the_last_step_that_are_reported_late_are_awaited():
    world = World(steps=20)
    for node in (A, B):
        world.report(node, "stopped", 20)
    world.tell(Ticked)
    assert world.ordered(WriteGeneration) == []
    end(world)
    assert world.state.active.checkpointing.securing.point == Point(20, 3)
    world = World(steps=20)
    for node in (A, B):
        world.report(node, "stopped", 20)
    world.at += world.state.options.secure_s - 1.0
    world.tell(Ticked)
    assert world.ordered(WriteGeneration) == [], "a node may have been silent for a minute"
    world.at += 1.0
    world.tell(Ticked)
    assert world.ordered(WriteGeneration), "it is not awaited for ever"


def test_budget_that_ends_while_the_last_step_is_stored_does_not_hold_the_job():
    world = World(steps=20)
    end(world)
    spent = replace(world.state.job, bill=Bill(usd=2.0, until=world.at, usd_max=1.0))
    world.state = replace(world.state, jobs={JOB: spent})
    world.tell(Ticked)
    assert isinstance(world.state.active.phase, Running)
    world.report(A, "stopped", 20, sealed=[seal(20, 0, 1)], uploaded=whole(20))
    world.tell(ManifestWritten, JOB, durable(20))
    world.tell(CheckpointCommitted, JOB, durable(20))
    (closed,) = world.ordered(WriteGeneration)
    assert closed.record.reason == "all 20 steps are done"


def test_budget_that_ends_while_a_pause_saves_the_last_step_does_not_hold_the_job():
    world = World()
    world.tell(OrderGiven, Order("i", "pause", JOB))
    (stopping,) = world.ordered(WriteGeneration)
    world.tell(GenerationWritten, stopping.record)
    spent = replace(world.state.job, bill=Bill(usd=2.0, until=world.at, usd_max=1.0))
    world.state = replace(world.state, jobs={JOB: spent})
    end(world)
    world.tell(Ticked)
    assert isinstance(world.state.active.phase, Stopping)
    assert world.ordered(WriteGeneration) == [], "it is not closed before its step is durable"
    world.report(A, "stopped", 20, sealed=[seal(20, 0, 1)], uploaded=whole(20))
    world.tell(ManifestWritten, JOB, durable(20))
    world.tell(CheckpointCommitted, JOB, durable(20))
    (closed,) = world.ordered(WriteGeneration)
    assert closed.record.reason == "pause was ordered"


def test_job_without_checkpoints_is_done_at_once():
    world = World(steps=20, uri=None)
    for node in (A, B):
        world.report(node, "stopped", 20)
    assert world.ordered(WriteGeneration)
    world = World(steps=20)
    end(world)
    world.at += world.state.options.secure_s
    world.tell(Ticked)
    assert world.ordered(WriteGeneration)


def test_pause_waits_for_its_step_to_be_durable():
    world = World()
    world.tell(OrderGiven, Order("i", "pause", JOB))
    (stopping,) = world.ordered(WriteGeneration)
    world.tell(GenerationWritten, stopping.record)
    end(world, 12)
    assert world.ordered(WriteGeneration) == []
    world.report(A, "stopped", 12, sealed=[seal(12, 0, 1)], uploaded=whole(12))
    world.tell(ManifestWritten, JOB, durable(12))
    world.tell(CheckpointCommitted, JOB, durable(12))
    (closed,) = world.ordered(WriteGeneration)
    assert closed.record.state == "closed"


# ---- going back ---------------------------------------------------------------------------------


def lose_memory(world):
    """Both machines are started anew: nothing is left in memory."""
    names = {A: "a2", B: "b2"}
    fresh = tuple(NodeRecord(NodeId(new), old, "z", "m", "g", 1, new, "ready")
                  for old, new in names.items())  # fmt: skip
    world.tell(NodesObserved, fresh)
    for node in fresh:
        world.report(node.id, "idle", 0)
    world.at += 5.0
    world.tell(NodesObserved, fresh)
    world.at += 5.0
    world.tell(Ticked)
    (asked,) = world.ordered(RequestPlan)
    members = tuple(node.id for node in fresh)
    world.tell(PlanFound, asked.request, Proposal("p2", members, True, "why"))


def test_check_delays_a_reconfiguration_without_time_to_stop():
    """What runs goes on meanwhile, and nothing is moved or written before it is known."""
    world = World(durable=durable(10, 2))
    world.tell(OrderGiven, Order("i", "preempt", B, leaves_at=world.at + 3.0))
    world.at += 2.0  # Others may be warned at the same time.
    world.tell(Ticked)
    (asked,) = world.ordered(RequestPlan)
    proposal = Proposal("p2", (A,), True, "why", iteration_s=1.0)
    world.tell(PlanFound, asked.request, proposal)
    (check,) = world.ordered(CheckDurable)
    before = world.state.job
    for _ in range(3):
        assert world.tell(Ticked) == ()
    assert world.state.job == before
    world.tell(DurableChecked, JOB, check.durable, check.durable)
    (opened,) = world.ordered(WriteGeneration)
    assert opened.record.restore == Restore(Point(10, 2), "durable")


def test_job_without_readable_checkpoint_is_held_not_restarted():
    world = World(durable=durable(10, 2))
    lose_memory(world)
    world.tell(DurableChecked, JOB, durable(10, 2), None, "step 10 cannot be read")
    (closed,) = world.ordered(WriteGeneration)
    world.tell(GenerationWritten, closed.record)
    assert isinstance(world.state.active.phase, Held)
    assert "step 10 cannot be read" in world.state.active.phase.reason


def test_unavailable_storage_is_retried():
    world = World(durable=durable(10, 2))
    lose_memory(world)
    world.ordered(CheckDurable)
    world.tell(DurableChecked, JOB, durable(10, 2), None, "no answer", is_away=True)
    assert world.ordered(WriteGeneration) == []
    assert world.state.active.checkpointing.trouble == "no answer"
    world.at += world.state.options.commit_pause_s
    world.tell(Ticked)
    assert world.ordered(CheckDurable)


def test_checkpoint_that_led_nowhere_is_read_to_the_last_byte():
    world = World(durable=durable(10, 2))
    record = replace(RECORD, restore=Restore(Point(10, 2), "durable"))
    world.state = replace(world.state, active=replace(world.state.active, generation=record))
    lose_memory(world)
    (check,) = world.ordered(CheckDurable)
    assert check.is_thorough


def test_rollback_lowers_the_durable_step_with_its_generation():
    world = World(durable=durable(10, 2))
    back = durable(5, 1)
    world.tell(OrderGiven, Order("i", "rollback", JOB, durable=back))
    (asked,) = world.ordered(RequestPlan)
    world.tell(PlanFound, asked.request, Proposal("plan", (A, B), False, "why"))
    (opened,) = world.ordered(WriteGeneration)
    assert (opened.record.number, opened.record.restore) == (4, Restore(Point(5, 1), "durable"))
    assert opened.lowers == back
    assert isinstance(world.state.active.phase, Opening)
    assert opened.settles == "i", "the order is forgotten with it, and not before or after"
    world.tell(GenerationWritten, opened.record)
    assert world.ordered(SettleOrder) == []
    assert world.state.durables[JOB] == back
    assert world.state.active.orders == ()


def test_snapshots_after_the_rollback_point_are_void():
    world = World(durable=durable(10, 2))
    world.tell(OrderGiven, Order("i", "rollback", JOB, durable=durable(5, 1)))
    (asked,) = world.ordered(RequestPlan)
    world.tell(PlanFound, asked.request, Proposal("plan", (A, B), False, "why"))
    world.tell(GenerationWritten, world.ordered(WriteGeneration)[0].record)
    for node in (A, B):
        world.report(node, "failed", 12, sealed=[seal(12, 0, 1)], generation=4)
    world.at += 5.0
    world.tell(Ticked)
    (asked,) = world.ordered(RequestPlan)
    world.tell(PlanFound, asked.request, Proposal("plan", (A, B), False, "why"))
    world.tell(DurableChecked, JOB, durable(5, 1), durable(5, 1))
    (opened,) = world.ordered(WriteGeneration)
    assert opened.record.restore.point == Point(5, 1)
