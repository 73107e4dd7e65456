"""The planner's processes answer questions about live nodes, and survive what happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agents.protocol import NodeId, NodeRecord
from sailord.planning import Found, PlanningService, Request, answer, job_shape, read_job
from simulator.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
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


def test_what_runs_is_replanned_without_the_node_that_is_gone():
    first = answer(QUESTION)
    assert isinstance(first, Found)
    left = tuple(record for record in NODES if record.id not in first.proposal.members)
    second = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES))
    assert isinstance(second, Found)
    assert set(second.proposal.members) <= {record.id for record in left}
    assert second.proposal.is_worth_it
    assert second.proposal.move_s > 0


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
    assert job_shape(read_job(SPEC)) == (6, 2)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_planner_that_is_killed_is_an_answer_and_the_next_question_gets_its_plan():
    service = PlanningService()
    try:
        asked = asyncio.create_task(service.ask(QUESTION, timeout_s=30))
        while not (service._pool and service._pool._processes):
            await asyncio.sleep(0.01)
        for pid in list(service._pool._processes):
            os.kill(pid, signal.SIGKILL)
        assert await asked == "a process of the planner died"
        assert isinstance(await service.ask(QUESTION, timeout_s=60), Found)
        assert "within" in str(await service.ask(QUESTION, timeout_s=0.0))
    finally:
        service.close()
