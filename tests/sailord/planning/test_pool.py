"""The planner's processes answer questions about live nodes, and survive what happens to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from agents.protocol.records import GenerationRecord, JobId, NodeId, NodeRecord, Point, Restore
from planner.move_policy.node_lifetimes import History
from planner.replan.replanner import Replanner
from sailord.planning import pool as planning
from sailord.planning.machine_lifetimes import Past, pool_of
from sailord.planning.plan_search import answer
from sailord.planning.pool import (
    Found,
    PlanningService,
    Request,
    Unanswered,
    job_shape,
    read_job,
    the_same_again,
)
from simulator.documents.problems import InputError

ROOT = Path(__file__).resolve().parents[3]
SPEC = (ROOT / "examples" / "small.toml").read_text(encoding="utf-8")


def node(name: str, *, gpus: int = 2) -> NodeRecord:
    return NodeRecord(
        NodeId(f"{name}.1"), name, "us-central1-b", f"A100-40x{gpus}", "A100-40", gpus, "h:1"
    )


NODES = (node("a"), node("b"), node("c"))
QUESTION = Request(SPEC, ROOT / "examples" / "three-zones.toml", None, NODES, None, (), False)


def test_a_plan_stands_on_nodes_that_are_there():
    found = answer(QUESTION)
    assert isinstance(found, Found)
    assert set(found.proposal.members) <= {record.id for record in NODES}
    assert found.about["tokens_per_iteration"] == 16 * 64
    estimate, plan = found.about["estimate"], json.loads(found.plan)
    stages = [(p, s) for p, pipeline in enumerate(plan["pipelines"]) for s in pipeline["stages"]]
    assert len(found.proposal.peaks) == sum(stage["tp"] for _, stage in stages)
    most = max(peak for stages in estimate["peak_memory_bytes"] for peak in stages)
    assert max(peak.tensors + peak.context for peak in found.proposal.peaks) == most


def test_what_runs_is_replanned_without_the_node_that_is_gone():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    left = tuple(record for record in NODES if record.id not in first.proposal.members)
    second = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES))
    assert isinstance(second, Found)
    assert set(second.proposal.members) <= {record.id for record in left}
    assert second.proposal.is_worth_it
    assert second.proposal.move_s > 0
    assert [name for name, _ in second.proposal.move_phases] == [
        *("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"),
    ]
    # Beside the phases stands what is done again.
    assert second.proposal.move_s >= sum(seconds for _, seconds in second.proposal.move_phases) > 0


def test_a_machine_that_a_new_leader_never_saw_is_known_from_the_plan_itself():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    gone = min(first.proposal.members)
    left = tuple(record for record in NODES if record.id != gone)
    told = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES))
    untold = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=left))
    assert isinstance(told, Found)
    assert isinstance(untold, Found)
    assert "lost devices" in untold.proposal.why
    assert untold.proposal == told.proposal


def test_where_nothing_runs_nobody_searches_on(monkeypatch):
    first = answer(QUESTION)
    assert isinstance(first, Found)
    monkeypatch.setattr(Replanner, "improve", lambda *_: pytest.fail("it searched"))
    again = answer(replace(QUESTION, running=first.plan, ran_on=NODES, is_urgent=True))
    assert isinstance(again, Found)


def test_the_same_again_takes_no_planner_and_a_moment_is_predicted_for_it():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    members, point = first.proposal.members, Restore(Point(7, 1), "memory")
    record = GenerationRecord(
        JobId("j"), 1, "open", first.proposal.plan, members, point, 1, "a test", usd_per_hour=3.0
    )
    again = the_same_again(record, first.plan, json.loads(first.about_bytes))
    assert again is not None
    assert (again.proposal.plan, again.proposal.members) == (first.proposal.plan, members)
    assert again.proposal.iteration_s == first.proposal.iteration_s
    assert again.proposal.usd_per_hour == 3.0
    phases = again.about["move"]["phases"]
    assert again.proposal.move_s > sum(phases.values()) > 0
    assert phases["fetch_s"] == 0.0
    assert the_same_again(record, first.plan, {"estimate": {}}) is None


def test_nothing_changes_where_nothing_changed():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    again = answer(replace(QUESTION, running=first.plan, ran_on=NODES))
    assert isinstance(again, Found)
    assert not again.proposal.is_worth_it or again.proposal.plan == first.proposal.plan


def test_the_safe_plan_takes_the_fewest_nodes():
    found = answer(replace(QUESTION, is_safe=True))
    assert isinstance(found, Found)
    assert len(found.proposal.members) == 1


def test_a_job_may_not_name_files_of_the_daemons_machine():
    spec = '[model]\nconfig = "/etc/passwd"\n[training]\nglobal_batch = 4\n'
    with pytest.raises(InputError, match="names a file"):
        read_job(spec)


def test_the_shape_of_a_job_is_what_its_snapshots_must_cover():
    assert job_shape(read_job(SPEC)) == (7, 3)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_planner_that_is_killed_is_an_answer_and_the_next_question_gets_its_plan():
    service = PlanningService()
    try:
        asked = asyncio.create_task(service.ask(QUESTION, timeout_s=30))
        while not (working := [p for desk in service._desks for p in desk.processes]):
            await asyncio.sleep(0.01)
        for process in working:
            os.kill(process.pid, signal.SIGKILL)
        died = await asked
        assert isinstance(died, Unanswered)
        assert died == "its process died"
        assert isinstance(await service.ask(QUESTION, timeout_s=60), Found)
        assert "within" in str(await service.ask(QUESTION, timeout_s=0.0))
    finally:
        service.close()


def running_question(found: Found, **changes) -> Request:
    return replace(QUESTION, running=found.plan, ran_on=NODES, **changes)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_lost_node_was_foreseen_and_costs_no_planning():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    service = PlanningService()
    try:
        service.foresee(running_question(first))
        members = sorted(first.proposal.members)
        while service.foreseen < len(members):
            await asyncio.sleep(0.01)
        for lost in members:
            left = tuple(record for record in NODES if record.id != lost)
            question = running_question(first, nodes=left)
            # There is no time at all, and yet an answer: the very one that the planner gives.
            found = await service.ask(question, timeout_s=0.0)
            assert isinstance(found, Found), found
            assert set(found.proposal.members) <= {record.id for record in left}
            assert found.proposal.is_worth_it
            fresh = answer(question)
            assert isinstance(fresh, Found)
            assert found.proposal.iteration_s <= fresh.proposal.iteration_s * (1 + 1e-9)
            # An answer that stands on a node that is gone as well is none.
            gone = set(found.proposal.members)
            fewer = tuple(record for record in left if record.id not in gone)
            late = running_question(first, nodes=fewer)
            assert "within 0 s" in str(await service.ask(late, timeout_s=0.0))
        # Whatever else is asked, the planner must think about.
        for other in (
            running_question(first),
            running_question(first, nodes=left, is_safe=True),
            replace(QUESTION, nodes=left),
        ):
            assert "within 0 s" in str(await service.ask(other, timeout_s=0.0))
    finally:
        service.close()


@pytest.mark.asyncio
@pytest.mark.slow
async def test_who_looks_ahead_rests_while_there_is_a_question():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    service = PlanningService()
    try:
        assert isinstance(await service.ask(QUESTION, timeout_s=60), Found)
        (thinking,) = service._desks[0].processes
        os.kill(thinking.pid, signal.SIGSTOP)
        asked = asyncio.create_task(service.ask(QUESTION, timeout_s=60))
        await asyncio.sleep(0)
        service.foresee(running_question(first))
        while service._scout.waiting or not service._scout.processes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert service.foreseen == 0
        os.kill(thinking.pid, signal.SIGCONT)
        assert isinstance(await asked, Found)
        while not service.foreseen:
            await asyncio.sleep(0.01)
    finally:
        service.close()


def test_a_newcomer_must_have_been_up_for_a_while():
    """How long, and what was seen of its kind, decide on a move that nothing forces."""
    spec = (ROOT / "examples" / "opt-350m.toml").read_text(encoding="utf-8")
    nodes = tuple(node(name, gpus=4) for name in "ab")
    question = replace(QUESTION, spec=spec, nodes=nodes[:1])
    first = answer(question)
    assert isinstance(first, Found)
    grown = replace(question, nodes=nodes, running=first.plan, ran_on=nodes[:1])

    def judged(past):
        found = answer(replace(grown, past=past))
        assert isinstance(found, Found)
        return found.proposal

    assert judged(Past(settle_s=30.0)).is_worth_it
    young = Past(age_s=tuple((record.id, 12.0) for record in nodes), settle_s=30.0)
    assert not judged(young).is_worth_it
    assert judged(young).ask_again_s == 18.0
    pool = pool_of(nodes[0])
    stormy = History().seen(0.0, up={pool: 3}, lost={})
    for second in range(1, 60):
        stormy = stormy.seen(float(second), up={pool: 3}, lost={pool: 30})
    settled = replace(young, age_s=())
    assert judged(settled).is_worth_it
    assert not judged(replace(settled, history=stormy, now_s=60.0)).is_worth_it
    assert not judged(replace(settled, last_move_s=59.0, now_s=60.0)).is_worth_it


def test_of_questions_that_wait_only_the_newest_is_thought_about():
    """Nodes that come one after the other ask anew each time; nobody needs the older answers."""

    class Slow:
        """A process that is at the first question until it is let go on."""

        def __init__(self):
            self.taken, self.waiting, self.go = [], 0, asyncio.Event()

        async def run(self, _work, request):
            self.waiting += 1
            self.taken.append(request)
            await self.go.wait()
            self.waiting -= 1
            return f"answer {len(request.nodes)}"

        def clear(self):
            self.waiting = 0

    async def ask_all():
        first, second = desks = (Slow(), Slow())
        service = PlanningService(_desks=desks)
        questions = [replace(QUESTION, nodes=NODES[:1] * number) for number in range(1, 6)]
        asked = [asyncio.create_task(service.ask(q, timeout_s=30)) for q in questions]
        await asyncio.sleep(0)
        first.go.set()
        answers = await asyncio.gather(*asked[:1], *asked[2:])
        second.go.set()
        return [*answers, await asked[1]], [len(q.nodes) for q in first.taken + second.taken]

    answers, taken = asyncio.run(ask_all())
    assert sorted(taken) == [1, 2, 5]
    assert [answers[0], answers[3], answers[4]] == ["answer 1", "answer 5", "answer 2"]
    assert all("newer question" in text for text in answers[1:3])


class SlowToBegin(ProcessPoolExecutor):
    """Hands its first task over only once the loop has done something meanwhile."""

    loop_goes_on = threading.Event()

    def submit(self, *task, **named):
        assert self.loop_goes_on.wait(20.0), "the loop stands still until the process is there"
        return super().submit(*task, **named)


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_a_process_begins(monkeypatch):
    monkeypatch.setattr(planning, "ProcessPoolExecutor", SlowToBegin)
    monkeypatch.setattr(SlowToBegin, "loop_goes_on", threading.Event())
    desk = planning.Desk()
    asked = [asyncio.create_task(desk.run(os.getpid)) for _ in range(2)]
    await asyncio.sleep(0.05)
    SlowToBegin.loop_goes_on.set()
    first, second = await asyncio.gather(*asked)
    assert first == second != os.getpid()
    desk.clear()


@pytest.mark.asyncio
async def test_who_is_ended_before_its_process_began_ends_it_then(monkeypatch):
    monkeypatch.setattr(planning, "ProcessPoolExecutor", SlowToBegin)
    monkeypatch.setattr(SlowToBegin, "loop_goes_on", threading.Event())
    desk = planning.Desk()
    asked = asyncio.create_task(desk.run(os.getpid))
    await asyncio.sleep(0.05)
    pool = desk._pool
    desk.clear()
    SlowToBegin.loop_goes_on.set()
    with pytest.raises(BrokenProcessPool):
        await asked
    async with asyncio.timeout(20):
        while pool._processes:
            await asyncio.sleep(0.02)
    assert isinstance(await desk.run(os.getpid), int)
    desk.clear()
