"""Every command that a rule waits for ends in its event, whatever is raised."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from agents.daemon.clock import Clock
from agents.protocol.records import JobId, JobRecord, Point, Saving
from agents.protocol.store_keys import Keys
from sailord.checkpoints.catalog import Checkpoints
from sailord.cluster_records import Gateway
from sailord.controller.cluster_state import ClusterState
from sailord.controller.effects import Effects
from sailord.controller.inbox import Inbox
from sailord.core.model.commands import (
    CheckDurable,
    Effect,
    ProbeAgent,
    RequestPlan,
    WriteManifest,
)
from sailord.core.model.events import (
    CommitFailed,
    DurableChecked,
    Event,
    PlanRefused,
    ProbeFailed,
)
from sailord.core.model.state import State
from sailord.core.sharing.parts import Parts
from sailord.planning.messages import PoolPrice, Unpaid
from tests.sailord.core.states import JOB, A, B, G, durable, node, record, state

OUTSIDE = JobRecord(JOB, "running", saving=Saving("file:///elsewhere"))
WAITED_FOR: dict[type, tuple[Effect, type[Event]]] = {
    RequestPlan: (RequestPlan(1, JOB, (A,), None), PlanRefused),
    WriteManifest: (WriteManifest(OUTSIDE, G, (), Point(20, 3), None), CommitFailed),
    CheckDurable: (CheckDurable(OUTSIDE, durable(20), False), DurableChecked),
    ProbeAgent: (ProbeAgent(A), ProbeFailed),
}


class Burning:
    """Raises an unexpected exception at every call."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the machine burns")


def outcome(command: Effect, checkpoints: Any) -> Event:
    """The event in which a command ends."""
    burning: Any = Burning()

    async def run() -> Event:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        clock = Clock()
        effects = Effects(
            burning, Gateway(burning, Keys("test")), burning, burning, checkpoints,
            ClusterState(Parts(state(None, node(A)))), Inbox(clock), clock, {},
        )  # fmt: skip
        effects.start(command, "Ticked")
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        return effects.inbox._events.get_nowait()[1]

    return asyncio.run(run())


def test_all_commands_that_end_in_an_event_are_tried() -> None:
    ending = {kind for kind in get_args(Effect) if "nds in ``" in (kind.__doc__ or "")}
    assert ending == set(WAITED_FOR)


@pytest.mark.parametrize("kind", WAITED_FOR)
def test_a_command_whose_work_fails_ends_in_its_event(kind: type) -> None:
    command, event = WAITED_FOR[kind]
    found = outcome(command, Burning())
    assert isinstance(found, event)
    if not isinstance(found, ProbeFailed):
        assert "the machine burns" in found.why


def test_a_refused_place_for_checkpoints_is_the_answer_of_the_check() -> None:
    found = outcome(WAITED_FOR[CheckDurable][0], Checkpoints(("file:///kept",)))
    assert isinstance(found, DurableChecked)
    assert (found.of, found.found, found.is_away) == (durable(20), None, False)
    assert "'file:///elsewhere' is not where jobs may have checkpoints" in found.why
    assert "sailord failed" not in found.why


@pytest.mark.parametrize("why", ["it does not fit", Unpaid("it is too dear")])
async def test_a_refusal_tells_whether_dollars_are_in_the_way(why: str) -> None:
    class Refusing:
        async def read_spec(self, _: JobId) -> str:
            return "a spec"

        async def ask(self, _: object, **__: object) -> str:
            return why

    others: Any = Burning()
    options = SimpleNamespace(plan_s=1.0)
    config: Any = SimpleNamespace(
        cluster_file=Path(), profiles=None, measured_links=None, options=options
    )
    refusing: Any = Refusing()
    known = ClusterState(Parts(state(None, node(A))))
    effects = Effects(
        config, refusing, others, refusing, others, known, Inbox(Clock()), Clock(), {}
    )
    await effects._plan(RequestPlan(1, JOB, (A,), None), "Ticked")
    event = effects.inbox._events.get_nowait()[1]
    assert isinstance(event, PlanRefused)
    assert (event.why, event.is_known, event.is_unpaid) == (why, True, isinstance(why, Unpaid))


async def test_question_survives_a_leadership_that_is_lost_while_it_is_read() -> None:
    class Slow:
        async def read_spec(self, _: JobId) -> bytes:
            effects.cluster.state = State()
            return b"a spec"

    others: Any = Burning()
    config: Any = SimpleNamespace(cluster_file=Path(), profiles=None, measured_links=None)
    gateway: Any = Slow()
    other = node(B, record=record(B, gpu="T4"))
    known = ClusterState(Parts(state(None, node(A), other)))
    effects = Effects(config, gateway, others, others, others, known, Inbox(Clock()), Clock(), {})
    effects.prices = lambda: (PoolPrice("z", "m", "T4", spot=True, usd_per_gpu_hour=0.1),)
    request = await effects._request(JOB, (A,), None)
    assert request is not None
    assert request.prices == effects.prices()
    assert [each.id for each in request.nodes] == [A]
    assert request.kinds == ("A100-40", "T4"), "also of nodes that it is not about"
    assert await effects._request(JOB, (A,), None) is None
