"""Planner processes answer in time, survive crashes, and precompute plans."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from sailord.planning import pool as planning
from sailord.planning.messages import FoundPlan, NoAnswer, PlanRequest
from sailord.planning.plan_search import answer
from sailord.planning.pool import PlannerPool, PlannerProcess
from sailord.planning.precomputed import NextPlan
from tests.sailord.planning.requests import NODES, QUESTION


def processes_of(worker):
    """Return the processes of a planner's pool."""
    return tuple(((worker._pool and worker._pool._processes) or {}).values())


@pytest.mark.slow
async def test_killed_planner_process_is_restarted_for_the_next_request():
    service = PlannerPool()
    try:
        asked = asyncio.create_task(service.ask(QUESTION, timeout_s=30))
        while not (working := [p for worker in service._workers for p in processes_of(worker)]):
            await asyncio.sleep(0.01)
        for process in working:
            os.kill(process.pid, signal.SIGKILL)
        died = await asked
        assert isinstance(died, NoAnswer)
        assert died == "the planner process died"
        assert isinstance(await service.ask(QUESTION, timeout_s=60), FoundPlan)
        assert "within" in str(await service.ask(QUESTION, timeout_s=0.0))
    finally:
        service.close()


def running_question(found: FoundPlan, **changes) -> PlanRequest:
    return replace(QUESTION, running=found.plan, ran_on=NODES, **changes)


@pytest.mark.slow
async def test_loss_of_a_node_is_answered_from_the_precomputed_plans():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    service = PlannerPool()
    try:
        service.precompute(running_question(first))
        members = sorted(first.proposal.members)
        while service.precomputed_losses < len(members):
            await asyncio.sleep(0.01)
        follows = service.following(members[0])
        assert isinstance(follows, NextPlan)
        assert follows.nodes > 0
        assert follows.nodes <= follows.gpus <= 2 * follows.nodes
        assert first.proposal.iteration_s <= follows.step_s
        for lost in members:
            left = tuple(record for record in NODES if record.id != lost)
            question = running_question(first, nodes=left)
            # Timeout 0: only a precomputed answer is possible.
            found = await service.ask(question, timeout_s=0.0)
            assert isinstance(found, FoundPlan), found
            assert set(found.proposal.members) <= {record.id for record in left}
            assert found.proposal.is_worth_it
            fresh = answer(question)
            assert isinstance(fresh, FoundPlan)
            assert found.proposal.iteration_s <= fresh.proposal.iteration_s * (1 + 1e-9)
            # It does not apply to a node whose agent has found other devices since.
            other = replace(next(r for r in left if r.id in found.proposal.members), gpus=9)
            changed = tuple(other if r.id == other.id else r for r in left)
            again = running_question(first, nodes=changed)
            assert "within 0 s" in str(await service.ask(again, timeout_s=0.0))
            # No precomputed answer applies if one of its own nodes is lost too.
            gone = set(found.proposal.members)
            fewer = tuple(record for record in left if record.id not in gone)
            late = running_question(first, nodes=fewer)
            assert "within 0 s" in str(await service.ask(late, timeout_s=0.0))
        # All other requests need the planner.
        for other in (
            running_question(first),
            replace(QUESTION, nodes=left),
        ):
            assert "within 0 s" in str(await service.ask(other, timeout_s=0.0))
    finally:
        service.close()


@pytest.mark.slow
async def test_precomputing_pauses_while_a_request_is_open():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    service = PlannerPool()
    try:
        assert isinstance(await service.ask(QUESTION, timeout_s=60), FoundPlan)
        (thinking,) = processes_of(service._workers[0])
        os.kill(thinking.pid, signal.SIGSTOP)
        asked = asyncio.create_task(service.ask(QUESTION, timeout_s=60))
        await asyncio.sleep(0)
        service.precompute(running_question(first))
        while service._ahead_worker.waiting or not processes_of(service._ahead_worker):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert service.precomputed_losses == 0
        os.kill(thinking.pid, signal.SIGCONT)
        assert isinstance(await asked, FoundPlan)
        while not service.precomputed_losses:
            await asyncio.sleep(0.01)
    finally:
        service.close()


class Slow:
    """Blocks at its request until ``go`` is set."""

    def __init__(self):
        self.taken, self.waiting, self.go = [], 0, asyncio.Event()

    async def run(self, _work, _name, request):
        self.waiting += 1
        self.taken.append(request)
        await self.go.wait()
        self.waiting -= 1
        return f"answer {len(request.nodes)}"

    def kill(self):
        self.waiting = 0


def test_only_the_newest_waiting_request_is_answered():
    """Nodes that join one after the other each cause a request; only the last answer counts."""

    async def ask_all():
        first, second = workers = (Slow(), Slow())
        service = PlannerPool(_workers=workers)
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
    assert all("newer request" in text for text in answers[1:3])


def test_a_request_of_another_job_supersedes_none():
    """Jobs that share the cluster may all ask at once."""

    async def ask_all():
        service = PlannerPool(_workers=(Slow(), Slow()))
        jobs = {str(n): replace(QUESTION, nodes=NODES[:1] * n) for n in range(1, 5)}
        asked = [service.ask(each, timeout_s=30, job=job) for job, each in jobs.items()]
        tasks = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(0)
        for worker in service._workers:
            worker.go.set()
        return await asyncio.gather(*tasks), service._newest

    answers, still_open = asyncio.run(ask_all())
    assert answers == ["answer 1", "answer 2", "answer 3", "answer 4"]
    assert still_open == {}


class SlowToBegin(ProcessPoolExecutor):
    """Blocks ``submit`` until the event loop has run meanwhile."""

    loop_goes_on = threading.Event()

    def submit(self, *task, **named):
        assert self.loop_goes_on.wait(20.0), "the event loop was blocked until the process existed"
        return super().submit(*task, **named)


async def test_event_loop_runs_while_a_process_starts(monkeypatch):
    monkeypatch.setattr(planning, "ProcessPoolExecutor", SlowToBegin)
    monkeypatch.setattr(SlowToBegin, "loop_goes_on", threading.Event())
    process = planning.PlannerProcess()
    asked = [asyncio.create_task(process.run(os.getpid)) for _ in range(2)]
    await asyncio.sleep(0.05)
    SlowToBegin.loop_goes_on.set()
    first, second = await asyncio.gather(*asked)
    assert first == second != os.getpid()
    process.kill()


async def test_process_killed_during_its_start_is_killed_once_started(monkeypatch):
    monkeypatch.setattr(planning, "ProcessPoolExecutor", SlowToBegin)
    monkeypatch.setattr(SlowToBegin, "loop_goes_on", threading.Event())
    process = planning.PlannerProcess()
    asked = asyncio.create_task(process.run(os.getpid))
    await asyncio.sleep(0.05)
    executor = process._pool
    process.kill()
    SlowToBegin.loop_goes_on.set()
    with pytest.raises(BrokenProcessPool):
        await asked
    async with asyncio.timeout(20):
        while executor._processes:
            await asyncio.sleep(0.02)
    assert isinstance(await process.run(os.getpid), int)
    process.kill()


@pytest.mark.slow
async def test_a_process_that_dies_while_it_builds_tables_is_replaced(monkeypatch):
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    service = PlannerPool()
    run = PlannerProcess.run

    async def dies(self, call, *arguments):
        if arguments[0] == "plan_search.build_tables":
            raise BrokenProcessPool
        return await run(self, call, *arguments)

    monkeypatch.setattr(PlannerProcess, "run", dies)
    killed = []
    monkeypatch.setattr(PlannerProcess, "kill", lambda worker: killed.append(worker))  # noqa: PLW0108 - bound as a method
    try:
        service.precompute(running_question(first))
        assert service._precomputing is not None
        await service._precomputing
        assert killed == [service._workers[0]], "not the one that had computed the answers"
    finally:
        monkeypatch.undo()
        service.close()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_search_that_nobody_waits_for_is_ended_unless_another_question_is_behind_it(
    monkeypatch, others
):
    async def hangs(*_):
        await asyncio.Event().wait()

    killed = []
    monkeypatch.setattr(PlannerProcess, "run", hangs)
    monkeypatch.setattr(PlannerProcess, "kill", lambda worker: killed.append(worker))  # noqa: PLW0108 - bound as a method
    service = PlannerPool()
    service._capacity_worker.waiting = others
    said = await service.ask_timeline(QUESTION, timeout_s=0.01)
    assert isinstance(said, NoAnswer)
    assert killed == ([] if others else [service._capacity_worker])
