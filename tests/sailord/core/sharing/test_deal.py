"""What changes hands between jobs, and which of them waits in line again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import PREPARING, NodeId, Order
from sailord.core.model.commands import RequestPlan, WriteGeneration
from sailord.core.model.events import (
    CheckpointCommitted,
    GenerationWritten,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    PlanFound,
    PlanRefused,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Waiting
from sailord.core.queries.restore_choice import unsaved_steps
from sailord.core.sharing.deal import job_to_recall, next_handover
from sailord.core.sharing.parts import Parts, nodes_of
from tests.sailord.core.sharing_states import (
    OTHER,
    THIRD,
    act,
    both_train,
    elected,
    job,
    of,
    of_kind,
    running,
    says,
    three,
    train,
)
from tests.sailord.core.states import (
    JOB,
    NOW,
    A,
    B,
    C,
    D,
    durable,
    proposal,
    record,
    report,
)


def test_a_job_keeps_its_part_while_its_last_steps_are_in_memory_alone():
    """Paused without a plan it would end at once: nothing stores what its last node holds."""
    parts, left = both_train(), tuple(map(record, (A, B, D)))
    for at in range(5, 100):
        alive = report(A, number=at), report(B, number=at)
        broken = report(D, "broken", job=OTHER, number=at)
        told = Reported(NOW + at, broken, alive)
        parts, commands = act(parts, NodesObserved(NOW + at, left), told, Ticked(NOW + at))
        for asked in of_kind(RequestPlan, commands):
            if asked.job == OTHER:
                refusal = PlanRefused(NOW + at, asked.request, "it does not fit")
                parts, _ = act(parts, refusal)
        assert OTHER in parts.others
    active = parts.others[OTHER].active
    assert active.asked.is_refused
    assert isinstance(active.phase, Waiting)
    assert active.phase.since < NOW + 60
    assert unsaved_steps(parts.others[OTHER], active)


@pytest.mark.parametrize("unfit", [PREPARING, "its setup failed"])
def test_nodes_that_are_being_prepared_count_and_their_job_waits_for_them(unfit):
    """Each further node would begin to prepare anew, and the giver end with one node."""
    parts, _ = elected(
        job(),
        job(OTHER, part=(C, D)),
        generations=(of(JOB, A, B),),
        durables=((JOB, durable(10)),),
    )
    parts = train(parts, JOB, (A, B), NOW + 1)
    for at in range(2, 80):
        told = [replace(says(id_, "idle", number=at), unfit=unfit) for id_ in (C, D)]
        parts, _ = act(parts, Reported(NOW + at, told[0], (told[1],)), Ticked(NOW + at))
        assert parts.handover is None
        assert not parts.recalled
    assert sorted(parts.others[OTHER].nodes) == [C, D]
    assert parts.too_few == {}
    told = [says(id_, "idle", number=80) for id_ in (C, D)]
    parts, commands = act(
        parts, Reported(NOW + 80, told[0], (told[1],)), *map(Ticked, range(1081, 1120))
    )
    assert [each.nodes for each in of_kind(RequestPlan, commands) if each.job == OTHER] == [(C, D)]


def test_a_broken_device_is_no_node_to_wait_for():
    parts, _ = elected(job(), job(OTHER, part=(D,)))
    for at in range(2, 60):
        broken = replace(says(D, "idle", number=at), fault="its GPU fell off the bus")
        parts, _ = act(parts, Reported(NOW + at, broken), Ticked(NOW + at))
    assert not parts.others
    assert parts.first.jobs[OTHER].state == "queued"


def test_a_job_gets_nothing_for_nodes_on_which_it_trains_until_their_announced_end():
    """What it got would be idle until then."""
    names = tuple(NodeId(f"n{number}") for number in range(8))
    shares = ((JOB, names[:4]), (OTHER, names[4:]))
    parts, _ = elected(
        job(),
        job(OTHER, part=names[4:]),
        nodes=tuple(map(record, names)),
        generations=tuple(replace(of(id_, *each), next_move_s=10.0) for id_, each in shares),
        durables=tuple((id_, durable(10)) for id_, _ in shares),
    )
    for id_, each in shares:
        parts = train(parts, id_, each, NOW + 1)
    for name in names[:2]:
        notice = Order(f"notice-{name}", "preempt", name, leaves_at=NOW + 3600)
        parts, _ = act(parts, OrderGiven(NOW + 2, notice))
    parts, _ = act(parts, Ticked(NOW + 60))
    assert parts.handover is None
    drains = [Order(f"drain-{name}", "drain", name) for name in names[:2]]
    parts, _ = act(parts, *(OrderGiven(NOW + 61, each) for each in drains), Ticked(NOW + 62))
    assert parts.handover is not None, "now it leaves them"


def test_a_lease_that_lapses_for_a_moment_moves_no_node():
    parts = three((4, 4, 4), (1.0, 1.0, 1.0))
    there = tuple(node.record for part in parts.all() for node in part.nodes.values())
    parts, _ = act(parts, NodesObserved(NOW + 40, there[:-2]), Ticked(NOW + 41))
    assert len(nodes_of(parts.others[THIRD])) == 2
    assert parts.handover is None
    parts, _ = act(parts, NodesObserved(NOW + 42, there), Ticked(NOW + 43))
    assert parts.handover is None


def with_b_cordoned() -> Parts:
    cordon = Order("c", "cordon", "machine-b", life=B)
    parts, _ = elected(
        job(),
        nodes=(record(A), record(B)),
        orders=(cordon,),
        generations=(of(JOB, A),),
        durables=((JOB, durable(10)),),
    )
    return train(parts, JOB, (A,), NOW + 1)


def test_a_newcomer_gets_no_cordoned_node():
    parts, _ = act(with_b_cordoned(), Reported(NOW + 2, says(B, "idle")))
    newcomer = JobSubmitted(NOW + 40, job(OTHER, "queued"))
    parts, _ = act(parts, newcomer, *(Ticked(NOW + at) for at in range(41, 60)))
    assert parts.handover is None
    assert not parts.others


def test_a_newcomer_gets_no_cordoned_member():
    """The job that trains there may stay; another one could not begin."""
    parts, _ = act(running(), OrderGiven(NOW + 2, Order("c", "cordon", "machine-d")))
    parts, _ = act(parts, JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 41))
    assert parts.handover is not None
    assert parts.handover.nodes == (C,)
    assert nodes_of(parts.first) == (A, B)


def test_a_job_whose_nodes_are_lost_before_it_began_waits_in_line_again():
    parts, _ = elected(
        job(),
        job(OTHER, part=(D,)),
        nodes=(record(A), record(D)),
        generations=(of(JOB, A),),
        durables=((JOB, durable(10)),),
    )
    parts, _ = act(train(parts, JOB, (A,), NOW + 1), NodesObserved(NOW + 2, (record(A),)))
    parts, _ = act(parts, *(Ticked(NOW + at) for at in range(3, 90)))
    assert not parts.others
    assert parts.first.jobs[OTHER].state == "queued"


@pytest.mark.parametrize(("priority", "recalled"), [(10, False), (0, True)])
def test_only_a_job_that_comes_later_makes_room_for_the_first(priority, recalled):
    parts, _ = elected(
        job(),
        job(OTHER, part=(C, D), priority=priority),
        generations=(of(OTHER, C, D),),
        durables=((OTHER, durable(10)),),
    )
    parts = train(parts, OTHER, (C, D), NOW + 1)
    parts, asked = act(parts, Ticked(NOW + 5))
    (question,) = of_kind(RequestPlan, asked)
    parts, _ = act(parts, PlanRefused(NOW + 6, question.request, "it does not fit"))
    parts, told = act(parts, *(Ticked(NOW + at) for at in range(7, 60)))
    assert bool(parts.recalled) == recalled
    # It stops at the end of a step, which is stored; the order to do so is not an operator's.
    for write in of_kind(WriteGeneration, told):
        parts, _ = act(parts, GenerationWritten(NOW + 60, write.record))
    if recalled:
        left, right = (report(id_, "stopped", job=OTHER, number=9) for id_ in (C, D))
        kept = CheckpointCommitted(NOW + 61, OTHER, durable(40))
        parts, told = act(parts, Reported(NOW + 61, left, (right,)), kept, Ticked(NOW + 62))
        for write in of_kind(WriteGeneration, told):
            parts, _ = act(parts, GenerationWritten(NOW + 63, write.record))
        parts, _ = act(parts, Ticked(NOW + 64))
        assert parts.first.jobs[OTHER].state == "queued"


def test_a_recall_is_over_once_a_person_resumes_the_job():
    """Until it is, nothing changes hands. It may be recalled anew."""
    parts, _ = elected(
        job(),
        job(OTHER, part=(C, D)),
        generations=(of(OTHER, C, D),),
        durables=((OTHER, durable(10)),),
    )
    parts, asked = act(parts, Ticked(NOW + 5))
    (question,) = of_kind(RequestPlan, asked)
    parts, _ = act(parts, PlanRefused(NOW + 6, question.request, "it does not fit"))
    parts, _ = act(parts, *(Ticked(NOW + at) for at in range(7, 40)))
    assert OTHER in parts.recalled, "its nodes have yet to say what they hold"
    parts, _ = act(parts, OrderGiven(NOW + 40, Order("o1", "resume", OTHER)))
    there = parts.others[OTHER]
    assert there.job.state == "running"
    assert {each.id for each in there.active.orders} == {*parts.recalled.values()}


def test_a_held_job_is_not_recalled():
    parts, _ = elected(job(), job(OTHER, "held", part=(C, D)))
    parts, asked = act(parts, Ticked(NOW + 5))
    (question,) = of_kind(RequestPlan, asked)
    parts, _ = act(parts, PlanRefused(NOW + 6, question.request, "it does not fit"))
    parts, _ = act(parts, *(Ticked(NOW + at) for at in range(7, 60)))
    assert parts.first.active.asked.is_refused
    assert job_to_recall(parts) is None
    assert parts.others[OTHER].job.state == "held"


def test_jobs_with_too_few_nodes_are_reconsidered_when_a_job_ends():
    parts, _ = elected(job(), job(OTHER, part=(C, D)))
    parts = replace(parts, too_few={JOB: 4, THIRD: 4})
    ended, _ = act(parts, OrderGiven(NOW + 2, Order("o", "cancel", JOB)))
    assert ended.too_few == {}
    ended, _ = act(parts, OrderGiven(NOW + 2, Order("o", "cancel", OTHER)))
    assert ended.too_few == {}


def test_a_job_that_comes_back_keeps_the_last_of_its_nodes():
    """They were to go since no job had them; without them it would wait until they are gone."""
    closed = replace(of(JOB, A, B), state="closed")
    parts, _ = elected(
        job(JOB, "paused"),
        job(OTHER, part=(C, D)),
        generations=(closed, of(OTHER, C, D)),
        durables=((JOB, durable(10)), (OTHER, durable(10))),
    )
    parts, _ = act(train(parts, OTHER, (C, D), NOW + 1), Ticked(NOW + 40))
    assert set(parts.handover.nodes) == {A, B}
    parts, _ = act(parts, Reported(NOW + 41, says(A, "idle")))
    assert sorted(parts.others[OTHER].nodes) == [A, C, D]
    parts, _ = act(parts, OrderGiven(NOW + 42, Order("r", "resume", JOB)))
    holds = report(B, "idle", sealed=(10,))
    parts, commands = act(parts, Reported(NOW + 43, holds), *map(Ticked, range(1044, 1060)))
    assert parts.handover is None
    assert not parts.first.nodes[B].is_draining
    assert [each.nodes for each in of_kind(RequestPlan, commands) if each.job == JOB] == [(B,)]


def test_a_part_that_is_largest_by_weight_alone_does_not_keep_others_from_giving():
    wanted = next_handover(three((9, 2, 1), (1.0, 1.0, 0.1)))
    assert wanted is not None
    assert (wanted[0], len(wanted[1])) == (OTHER, 3)


def test_a_job_for_which_there_are_too_few_does_not_keep_others_from_getting():
    parts = three((9, 2, 1), (1.0, 1.0, 1.0))
    assert next_handover(parts)[0] == THIRD
    wanted = next_handover(replace(parts, too_few={THIRD: 12}))
    assert wanted is not None
    assert wanted[0] == OTHER


def test_nodes_of_two_kinds_are_dealt_by_what_the_records_say_they_are_worth():
    """To a job that never ran they are worth what they are to others."""
    slow = {"gpu": "T4", "machine": "small"}
    opened = replace(of(JOB, A, B, C, D), worths=(("A100-40", 1.0), ("T4", 0.2)))
    parts, _ = elected(
        job(),
        nodes=(record(A), record(B), record(C, **slow), record(D, **slow)),
        generations=(opened,),
        durables=((JOB, durable(10)),),
    )
    parts = train(parts, JOB, (A, B, C, D), NOW + 1)
    parts, _ = act(parts, JobSubmitted(NOW + 40, job(OTHER, "queued")), Ticked(NOW + 41))
    assert parts.handover is not None
    assert set(parts.handover.nodes) == {B, D}


def test_what_gpus_are_worth_to_a_job_is_in_the_record_of_its_generation():
    parts, asked = act(elected(job())[0], Ticked(NOW + 5))
    (question,) = of_kind(RequestPlan, asked)
    found = proposal(A, B, worths=(("A100-40", 1.0),))
    _, opened = act(parts, PlanFound(NOW + 6, question.request, found))
    (write,) = of_kind(WriteGeneration, opened)
    assert write.record.worths == (("A100-40", 1.0),)
