"""Jobs that share the cluster: each event reaches its part, and nodes change hands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import (
    Holding,
    JobId,
    NodeId,
    Order,
    Point,
    Saving,
    Sealed,
)
from sailord.core.decide import decide
from sailord.core.model.commands import (
    Command,
    GiveOrder,
    RequestPlan,
    SettleOrder,
    WriteGeneration,
    WriteJob,
)
from sailord.core.model.events import (
    Elected,
    Event,
    GenerationWritten,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    PlanFound,
    PlanRefused,
    Reported,
    Ticked,
)
from sailord.core.model.options import Options
from sailord.core.model.phases import Opening, Waiting
from sailord.core.model.state import State
from sailord.core.queries.drain_status import drained
from sailord.core.sharing import decide_parts as decide_parts_module
from sailord.core.sharing.decide_parts import decide_parts
from sailord.core.sharing.parts import Parts, whole
from tests.sailord.core.sharing_states import (
    NODES,
    OTHER,
    SHARED,
    act,
    both_train,
    elected,
    job,
    of_kind,
    running,
    says,
)
from tests.sailord.core.states import (
    JOB,
    NOW,
    TERM,
    A,
    B,
    C,
    D,
    durable,
    generation,
    proposal,
    record,
    report,
)


def test_without_the_option_decide_parts_equals_decide():
    event = Elected(
        NOW, TERM, nodes=tuple(map(record, NODES)), jobs=(job(), job(OTHER)), generations=()
    )
    parts, commands = decide_parts(Parts(State()), event)
    assert Parts(decide(State(), event).state) == parts
    assert commands == decide(State(), event).commands
    assert whole(parts) is parts.first


def test_a_new_leader_finds_each_part_in_the_records():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    assert sorted(parts.first.nodes) == [A, B]
    assert sorted(parts.others[OTHER].nodes) == [C, D]
    assert parts.first.job.id == JOB
    assert parts.others[OTHER].job.id == OTHER
    assert sorted(whole(parts).nodes) == [A, B, C, D]
    assert sorted(whole(parts).jobs) == [JOB, OTHER]


def test_without_the_option_a_second_job_is_queued_and_its_generation_closed():
    """The nodes of an open generation would go on with it, and follow no other."""
    theirs = replace(generation(C, D), job=OTHER)
    parts, commands = elected(
        job(), job(OTHER, part=(C, D)), options=Options(), generations=(theirs,)
    )
    assert parts.first.jobs[OTHER] == job(OTHER, "queued", reason="job has the cluster")
    (write,) = of_kind(WriteGeneration, commands)
    assert (write.record.job, write.record.state, write.replaces) == (OTHER, "closed", theirs)
    assert parts.first.generations[OTHER].state == "closed"


def test_events_reach_the_part_that_they_are_about():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    parts, asked = act(parts, Ticked(NOW + 5))
    first, second = of_kind(RequestPlan, asked)
    assert first.request != second.request, "an answer names nothing but the number"
    assert (first.nodes, second.nodes) == ((A, B), (C, D))
    parts, opened = act(parts, PlanFound(NOW + 6, second.request, proposal(C, D)))
    (write,) = of_kind(WriteGeneration, opened)
    assert (write.record.job, write.record.members) == (OTHER, (C, D))
    parts, _ = act(parts, GenerationWritten(NOW + 7, write.record))
    assert parts.others[OTHER].active.generation == write.record
    assert parts.first.active.generation is None


def test_owners_of_all_nodes_are_found_in_one_pass():
    """Of two thousand nodes one by one it took a tenth of a second whenever the store was read."""
    parts = both_train()
    assert parts.owners() == {C: OTHER, D: OTHER}
    assert {id_: parts.owners().get(id_) for id_ in NODES} == {
        id_: parts.key_of(id_) for id_ in NODES
    }


def test_an_order_about_a_node_reaches_all_parts_and_is_resolved_once():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    drain = Order("o1", "drain", "machine-c")
    parts, commands = act(parts, OrderGiven(NOW + 1, drain))
    assert of_kind(GiveOrder, commands) == [GiveOrder(replace(drain, life=C))]
    assert parts.others[OTHER].nodes[C].is_draining
    assert C in parts.first.marks, "it holds if the first job gets this node"


def test_a_new_node_belongs_to_the_first_part():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    fresh = NodeId("e")
    parts, _ = act(parts, NodesObserved(NOW + 1, tuple(map(record, (*NODES, fresh)))))
    assert sorted(parts.first.nodes) == [A, B, fresh]


def test_a_node_whose_agent_restarts_is_lost_to_its_part_at_once():
    """Its new life is in the first part."""
    parts, fresh = both_train(), NodeId("d2")
    there = *map(record, (A, B, C)), record(fresh, name="machine-d")
    parts, _ = act(parts, NodesObserved(NOW + 2, there))
    assert sorted(parts.first.nodes) == [A, B, fresh]
    assert parts.others[OTHER].nodes[D].why_lost == "its agent was restarted"


def test_handovers_are_looked_for_once_a_second(monkeypatch):
    """With thousands of nodes sailord could not follow their reports if each one led to it."""
    looks = []
    monkeypatch.setattr(decide_parts_module, "next_handover", looks.append)
    parts = both_train()
    parts, _ = act(parts, *(Ticked(NOW + 60 + tick / 10) for tick in range(50)))
    assert len(looks) == 5


def test_a_second_job_gets_half_of_the_nodes_once_they_are_free():
    parts, commands = act(
        running(), JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 40.1)
    )
    assert parts.handover is not None
    assert parts.handover.to == OTHER
    assert set(parts.handover.nodes) == {C, D}
    (told,) = of_kind(WriteJob, commands)
    assert set(told.job.coming) == {C, D}, "agents send no replica there any more"
    assert parts.first.nodes[D].is_draining
    # They train on, so they are not free.
    parts, _ = act(parts, Ticked(NOW + 41))
    assert not parts.others
    # The next generation does without them, and they hold nothing that it needs.
    parts, commands = moved_to(parts, A, B)
    assert sorted(parts.first.nodes) == [A, B]
    assert sorted(parts.others[OTHER].nodes) == [C, D]
    assert not parts.others[OTHER].nodes[D].is_draining
    written = [each.job for each in of_kind(WriteJob, commands) if each.job.id == OTHER]
    assert written == [replace(written[0], state="running", part=(C, D), coming=())]
    assert isinstance(parts.others[OTHER].active.phase, Waiting)


def moved_to(
    parts: Parts, *members: NodeId, keep: tuple[Sealed, ...] = ()
) -> tuple[Parts, list[Command]]:
    """The first job goes on without the others of its nodes."""
    commands: list[Command] = []

    def then(*happened: Event) -> None:
        nonlocal parts
        parts, told = act(parts, *happened)
        commands.extend(told)

    at = parts.first.now
    then(Ticked(at + 1))
    asked = parts.first.active.question
    assert asked is not None
    then(PlanFound(at + 2, asked.request, proposal(*members)))
    (stopping,) = of_kind(WriteGeneration, commands)
    then(GenerationWritten(at + 3, stopping.record))
    parked = [
        replace(
            says(id_, "stopped", 41, 3, number=9),
            sealed=(sealed_at(41, 3),),
        )
        for id_ in NODES
    ]
    then(Reported(at + 4, parked[0], tuple(parked[1:])))
    opening = of_kind(WriteGeneration, commands)[-1]
    assert opening.record.members == members
    then(GenerationWritten(at + 5, opening.record))
    idle = [
        replace(says(id_, "idle", number=10), sealed=keep) for id_ in NODES if id_ not in members
    ]
    then(Reported(at + 6, idle[0], tuple(idle[1:])))
    return parts, commands


def sealed_at(step: int, number: int) -> Sealed:
    return Sealed(Point(step, number), (Holding(0, 0, 1),))


def test_a_handover_waits_for_a_giver_that_seldom_saves_its_steps():
    """Its next generation begins from what the nodes hold, and first saves steps of its own."""
    parts = running()
    slow = replace(parts.first.active.generation, step_s=20.0, memory_every=15)
    active = replace(parts.first.active, generation=slow)
    parts = replace(parts, first=replace(parts.first, active=active))
    parts, _ = act(parts, JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 41))
    parts, _ = moved_to(parts, A, B, keep=(sealed_at(41, 3),))
    for step in range(42, 57):
        at = NOW + 50 + 20 * (step - 42)
        told = [report(id_, step=step, of=4, number=step, sealed=()) for id_ in (A, B)]
        parts, _ = act(parts, Reported(at, told[0], (told[1],)), Ticked(at))
        assert parts.handover is not None
        assert not parts.others
    assert parts.first.now > parts.handover.since + 280
    told = [report(id_, step=57, of=4, number=57, sealed=(56,)) for id_ in (A, B)]
    parts, _ = act(parts, Reported(NOW + 350, told[0], (told[1],)), Ticked(NOW + 351))
    assert sorted(parts.others[OTHER].nodes) == [C, D]


def test_a_job_without_a_place_for_checkpoints_waits_in_line():
    """What only the memory of its nodes holds could be with another job by its next turn."""
    alone = job(OTHER, "queued", saving=Saving())
    parts, _ = act(running(), JobSubmitted(NOW + 40, alone), Ticked(NOW + 41))
    assert parts.handover is None


def test_a_handover_is_taken_back_if_the_giver_has_no_plan_without_the_nodes():
    parts, _ = act(running(), JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 41))
    parts, _ = act(parts, Ticked(NOW + 42))
    asked = parts.first.active.question
    assert asked is not None
    parts, commands = act(parts, PlanRefused(NOW + 43, asked.request, "it does not fit"))
    for at in range(44, 60):
        parts, told = act(parts, Ticked(NOW + at))
        commands += told
    assert parts.handover is None
    assert not parts.first.nodes[D].is_draining
    assert parts.first.jobs[OTHER].coming == ()
    assert parts.too_few == {OTHER: 4}
    parts, _ = act(parts, *(Ticked(NOW + at) for at in range(60, 200)))
    assert parts.handover is None, "it is not tried again with as many nodes"


def test_a_job_that_ends_gives_its_nodes_to_the_first_part():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    parts, commands = act(parts, OrderGiven(NOW + 1, Order("o1", "cancel", OTHER)))
    assert parts.others == {}
    assert sorted(parts.first.nodes) == [A, B, C, D]
    assert parts.first.jobs[OTHER].state == "cancelled"
    assert [each.job.part for each in of_kind(WriteJob, commands)] == [None]
    assert SettleOrder("o1") in commands


def test_nodes_of_a_first_part_without_a_job_go_to_another():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    parts, _ = act(parts, OrderGiven(NOW + 1, Order("o1", "cancel", JOB)))
    assert parts.first.active is None
    idle = [says(id_, "idle") for id_ in (A, B)]
    parts, commands = act(
        parts, Reported(NOW + 32, idle[0], (idle[1],)), Ticked(NOW + 32), Ticked(NOW + 33)
    )
    assert sorted(parts.others[OTHER].nodes) == [A, B, C, D]
    parts_written = [each.job.part for each in of_kind(WriteJob, commands) if each.job.id == OTHER]
    assert parts_written[-1] == (A, B, C, D)


@pytest.mark.parametrize("ordered", [None, "o1", "recall-it"])
def test_a_job_without_a_plan_for_its_part_waits_in_line_again(ordered):
    """Unless a person has paused it meanwhile."""
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    parts, asked = act(parts, Ticked(NOW + 5))
    theirs = next(each for each in of_kind(RequestPlan, asked) if each.job == OTHER)
    parts, _ = act(parts, PlanRefused(NOW + 6, theirs.request, "it does not fit"))
    orders = [OrderGiven(NOW + 7, Order(ordered, "pause", OTHER))] if ordered else []
    parts, _ = act(parts, *orders, *(Ticked(NOW + at) for at in range(8, 50)))
    assert parts.others == {}
    assert sorted(parts.first.nodes) == [A, B, C, D]
    assert parts.first.jobs[OTHER].state == ("paused" if ordered else "queued")
    assert parts.first.jobs[OTHER].part is None


def test_a_node_stays_while_a_record_is_being_stored_that_may_name_it():
    parts, _ = act(running(), JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 41))
    first = parts.first
    opening = Opening(generation(*NODES, number=4), proposal(*NODES))
    closed = replace(generation(*NODES), state="closed")
    idle = {id_: replace(first.nodes[id_], report=says(id_, "idle", number=20)) for id_ in NODES}
    first = replace(
        first,
        nodes=first.nodes.with_(idle),
        active=replace(first.active, phase=opening, generation=closed, question=None),
    )
    assert drained(first) == {C, D}, "by the last record nothing keeps them"
    parts, _ = act(replace(parts, first=first), Ticked(NOW + 42))
    assert not parts.others


def test_a_held_job_keeps_its_part_and_a_newcomer_gets_nodes_of_the_others():
    parts, _ = elected(
        job(),
        job(OTHER, "held", part=(D,)),
        generations=(generation(A, B, C),),
        durables=((JOB, durable(10)),),
    )
    reports = [says(id_, "running", 40, 3) for id_ in (A, B, C)]
    parts, _ = act(parts, Reported(NOW + 1, reports[0], tuple(reports[1:])))
    third = job(JobId("third"), "queued")
    parts, _ = act(parts, JobSubmitted(NOW + 40, third), Ticked(NOW + 41))
    assert parts.handover is not None
    assert parts.handover.nodes == (C,)


def test_fields_of_a_part_that_an_older_sailord_kept_are_forgotten():
    """It keeps fields that it does not know, and follows none of them."""
    left = job(OTHER, "queued", part=(C, D), coming=(A,))
    for options in (SHARED, Options()):
        parts, commands = elected(job(), left, options=options)
        assert parts.first.jobs[OTHER] == job(OTHER, "queued")
        assert WriteJob(job(OTHER, "queued")) in commands
    parts, _ = elected(job(part=(C, D)), options=Options())
    assert parts.first.job == job()
    assert sorted(parts.first.nodes) == [A, B, C, D]


@pytest.mark.parametrize(("weight", "given"), [(0.1, 1), (1.0, 2), (3.0, 3), (100.0, 3)])
def test_a_newcomer_gets_nodes_by_its_weight_and_leaves_one_to_each(weight, given):
    weighed = job(OTHER, "queued", weight=weight)
    parts, _ = act(running(), JobSubmitted(NOW + 40, weighed), Ticked(NOW + 41))
    assert parts.handover is not None
    assert len(parts.handover.nodes) == given


@pytest.mark.parametrize(("weight", "given"), [(1.0, 1), (3.0, 2), (0.3, 0)])
def test_a_larger_part_by_weight_gives_to_a_smaller_one(weight, given):
    """While that gains, so that no node comes back."""
    parts, _ = elected(
        job(),
        job(OTHER, part=(D,), weight=weight),
        generations=(generation(A, B, C),),
        durables=((JOB, durable(10)),),
    )
    reports = [says(id_, "running", 40, 3) for id_ in (A, B, C)]
    parts, _ = act(parts, Reported(NOW + 1, reports[0], tuple(reports[1:])), Ticked(NOW + 40))
    assert len(() if parts.handover is None else parts.handover.nodes) == given
