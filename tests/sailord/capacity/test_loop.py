"""What the capacity loop orders of the cluster, and what it passes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from agents.store.interface import StoreUnavailable
from sailord.capacity.core.model import (
    CapacityPolicy,
    CapacityRecord,
    Create,
    Drain,
    PauseJob,
    TargetSet,
    TookOver,
)
from sailord.capacity.loop import CapacityLoop
from sailord.core.model.phases import Held
from sailord.core.model.state import State
from sailord.planning.messages import CapacityAnswer
from sailord.providers.interface import (
    Granted,
    InDoubt,
    InstanceRequest,
    Notice,
    Observation,
    Queued,
    Refused,
)
from tests.gce.virtual_client import Gateway, VirtualLoop
from tests.sailord.capacity.core.story import FLEX, A, Story, instance

NOTICE = Notice(100.0, "7", "sailor-7", "preemption", 30.0)


class Warner:
    """A provider that has nothing, and says twice that an instance goes."""

    pools = ()

    async def observe(self):
        return Observation(0.0, ())

    async def prices(self):
        return {}

    async def quotas(self):
        return ()

    async def notices(self):
        await asyncio.sleep(5.0)  # A leader is elected by then.
        yield NOTICE
        yield NOTICE

    async def close(self):
        """Nothing is open."""


@pytest.mark.parametrize(("held_s", "orders"), [(1799.0, 0), (1801.0, 1)])
def test_a_job_that_is_held_for_long_gives_its_instances_back(held_s, orders):
    given, now = [], 10_000.0

    async def play() -> None:
        gateway = Gateway(lambda: False, given.append)
        gateway.term = 1
        active = SimpleNamespace(job="job", phase=Held("no plan", now - held_s))
        state = SimpleNamespace(
            term=1, active=active, unreadable=frozenset(), known_orders=frozenset()
        )
        loop = CapacityLoop(
            None, Warner(), CapacityPolicy(), SimpleNamespace(state=state), None, gateway,
            SimpleNamespace(now=lambda: now),
        )  # fmt: skip
        loop._term = 1
        loop.state = SimpleNamespace(instances={})
        await loop._want()
        assert given == [], "it has no instances"
        by_hand, rented = (
            SimpleNamespace(instance=SimpleNamespace(request_id=id_)) for id_ in ("", "r")
        )
        loop.state = SimpleNamespace(instances={"6": by_hand})
        await loop._want()
        assert given == [], "none of them is rented"
        loop.state = SimpleNamespace(instances={"7": rented})
        await loop._want()
        await loop._want()
        # Once it is carried out it is deleted: stored again, the next leader would pause the job.
        state.known_orders, before = frozenset(each.id for each in given), len(given)
        await loop._want()
        assert len(given) == before

    asyncio.run(play())
    assert len({each.id for each in given}) == orders
    assert all((e.kind, e.target) == ("pause", "job") and "no plan" in e.reason for e in given)


def test_a_spent_budget_of_one_job_pauses_no_other_job():
    """The first one has ended since."""
    given = []

    async def play() -> None:
        gateway = Gateway(lambda: False, given.append)
        gateway.term = 1
        active = SimpleNamespace(job="next")
        state = SimpleNamespace(term=1, active=active, known_orders=frozenset())
        loop = CapacityLoop(
            None, Warner(), CapacityPolicy(), SimpleNamespace(state=state), None, gateway,
            SimpleNamespace(now=lambda: 0.0),
        )  # fmt: skip
        loop._term = 1
        for job in ("first", "next", ""):
            loop._perform(PauseJob(f"budget of {job}", job))
            await asyncio.sleep(5.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    assert [each.reason for each in given] == ["budget of next", "budget of "]


def loop_that_gives(given) -> CapacityLoop:
    """A loop of a leader whose orders are kept in a list."""
    gateway = Gateway(lambda: False, given.append)
    gateway.term = 1
    cluster = SimpleNamespace(state=State(term=1), is_store_available=True)
    clock = SimpleNamespace(now=lambda: 100.0)
    return CapacityLoop(None, Warner(), CapacityPolicy(), cluster, None, gateway, clock)


def test_a_provider_notice_drains_the_node_under_one_id():
    given = []

    async def play() -> None:
        hands = loop_that_gives(given)
        work = asyncio.create_task(hands.run())
        await asyncio.sleep(20.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    assert {(each.kind, each.target, each.leaves_at) for each in given} == {
        ("preempt", "sailor-7", 130.0)
    }
    assert len(given) == 2
    assert len({each.id for each in given}) == 1, "the store takes an id once"


def test_an_instance_that_is_replaced_before_its_end_is_drained_at_once():
    """It is drained as by an operator: a notice would let the job train there until shortly
    before."""
    given = []

    async def play() -> None:
        loop = loop_that_gives(given)
        loop._term = 1
        loop._save = AsyncMock(return_value=True)
        await loop._drain(Drain("sailor-7", "the provider will soon delete it", 3700.0))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    assert {(each.kind, each.target, each.leaves_at) for each in given} == {
        ("drain", "sailor-7", 3700.0)
    }


class Garbled(Warner):
    """Its first answers cannot be read."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    def _read(self, what):
        self.asked[what] = self.asked.get(what, 0) + 1
        if self.asked[what] == 1:
            raise ValueError("Invalid isoformat string: ''")

    async def observe(self):
        self._read("instances")
        return Observation(asyncio.get_running_loop().time(), ())

    async def prices(self):
        self._read("prices")
        return {}

    async def quotas(self):
        self._read("quotas")
        return ()


def test_an_answer_of_the_provider_that_cannot_be_read_ends_nothing():
    """A sailord that dies of it at each start could give nothing back."""
    provider = Garbled()

    async def play() -> None:
        gateway = Gateway(lambda: False, lambda _: None)
        gateway.term = 1
        cluster = SimpleNamespace(state=State(term=1), is_store_available=True)
        clock = SimpleNamespace(now=asyncio.get_running_loop().time)
        loop = CapacityLoop(None, provider, CapacityPolicy(), cluster, None, gateway, clock)
        work = asyncio.create_task(loop.run())
        await asyncio.sleep(100.0)
        assert not work.done()
        assert (loop.state.observed_at, loop.state.quotas) == (pytest.approx(60.0, abs=50), ())
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    assert min(provider.asked.values()) > 1


class Queue(Warner):
    """A provider whose only pool has a queue."""

    pools = (FLEX,)

    def __init__(self) -> None:
        self.asked: list[InstanceRequest] = []
        self.withdrawn: list[InstanceRequest] = []

    async def observe(self):
        at, gone = asyncio.get_running_loop().time(), self.withdrawn
        queued = {ask.request_id: ask for ask in self.asked if ask not in gone}
        refused = tuple(Refused(ask.request_id, "unknown", "cancelled") for ask in gone)
        return Observation(at, (), queued=queued, refused=refused)

    async def prices(self):
        return {FLEX: 3.6}

    async def create(self, ask):
        self.asked.append(ask)
        return Queued(ask.request_id)

    async def cancel(self, ask):
        if not self.withdrawn:
            await asyncio.sleep(5.0)
        self.withdrawn.append(ask)
        return ""


def test_a_request_that_waits_is_withdrawn_once_no_job_wants_it():
    provider = Queue()

    async def play() -> CapacityLoop:
        gateway, now = Gateway(lambda: False, None), asyncio.get_running_loop().time
        gateway.term = 1
        cluster = SimpleNamespace(state=State(term=1), is_store_available=True)
        clock = SimpleNamespace(now=now)
        loop = CapacityLoop(None, provider, CapacityPolicy(), cluster, None, gateway, clock)
        work = asyncio.create_task(loop.run())
        await asyncio.sleep(5.0)
        loop._feed(TargetSet(now(), {FLEX: 2}))  # The next question finds no job.
        await asyncio.sleep(60.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return loop

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.run(play())
    assert [(ask.pool, ask.count) for ask in provider.asked] == [(FLEX, 2)]
    assert provider.withdrawn == provider.asked
    assert (loop.state.asks, loop.state.cooldowns) == ({}, {})


def test_a_question_to_the_planner_ends_with_its_job():
    asked = []

    class SlowPlanner:
        async def ask_capacity(self, _request, *, timeout_s):
            try:
                await asyncio.sleep(timeout_s)
            except asyncio.CancelledError:
                asked.append("abandoned")
                raise

    async def play() -> float:
        begun = asyncio.get_running_loop().time()
        gateway = Gateway(lambda: False, None)
        gateway.read_spec = lambda _: asyncio.sleep(0.0, "a job")
        active = SimpleNamespace(job="job", phase=None)
        state = SimpleNamespace(active=active, jobs={}, unreadable=frozenset(), nodes={})
        cluster = SimpleNamespace(state=state, move_context=())
        config = SimpleNamespace(cluster_file=None, profiles=(), measured_links=())
        loop = CapacityLoop(
            config, Warner(), CapacityPolicy(), cluster, SlowPlanner(), gateway,
            SimpleNamespace(now=lambda: 100.0),
        )  # fmt: skip
        asyncio.get_running_loop().call_later(3.0, setattr, state, "active", None)
        await loop._want()
        await loop._want()
        assert loop._events.get_nowait().target == {}, "nothing is wanted any more"
        return asyncio.get_running_loop().time() - begun

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(play()) < 5.0
    assert asked == ["abandoned"]


def test_instances_of_the_last_job_are_given_up_while_the_next_one_has_no_plan():
    answers = [CapacityAnswer((2,), "two"), CapacityAnswer(None, "no plan fits"), ValueError("bug")]

    class Planner:
        async def ask_capacity(self, _request, **_options):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def play() -> None:
        gateway = Gateway(lambda: False, None)
        gateway.read_spec = lambda _: asyncio.sleep(0.0, "a job")
        active, now = SimpleNamespace(job="first", phase=None), 100.0
        state = SimpleNamespace(active=active, jobs={}, unreadable=frozenset(), nodes={})
        cluster = SimpleNamespace(state=state, move_context=())
        config = SimpleNamespace(cluster_file=None, profiles=(), measured_links=())
        provider = Warner()
        provider.pools = (A,)
        loop = CapacityLoop(
            config, provider, CapacityPolicy(), cluster, Planner(), gateway,
            SimpleNamespace(now=lambda: now),
        )  # fmt: skip
        loop.state = Story().see(1.0, instance(1), instance(2)).state
        await loop._want()
        assert loop._events.get_nowait().target == {A: 2}
        assert loop.why_not_rented == ""
        active.job = "next"
        await loop._want()
        assert loop._events.get_nowait().target == {}, "the first job's instances are surplus"
        assert loop.why_not_rented == "no plan fits"
        # It began nevertheless, and runs on one of them.
        loop.state = replace(loop.state, in_use=frozenset({"n1"}))
        await loop._want()
        assert loop._events.get_nowait().target == {A: 1}
        now += 1000.0
        await loop._want()
        assert loop._events.get_nowait().target == {A: 1}, "a fault of the planner is no plan"
        assert answers == []
        # A new leader does not know whose instances they are.
        loop._target_of = None
        await loop._want()
        assert loop._events.empty()

    asyncio.run(play())


def test_a_request_is_in_doubt_after_a_fault_of_ours():
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 1}))
    (order,) = story.of(Create)

    class Faulty(Warner):
        async def create(self, _ask):
            raise OSError("no space left")

    gateway = Gateway(lambda: False, None)
    gateway.term = 1
    clock = SimpleNamespace(now=lambda: 100.0)
    loop = CapacityLoop(None, Faulty(), CapacityPolicy(), None, None, gateway, clock)
    loop._term, loop.state = 1, story.state
    asyncio.run(loop._create(order.ask))
    outcome = loop._events.get_nowait().outcome
    assert outcome == InDoubt(order.ask.request_id, "OSError: no space left")


@pytest.mark.parametrize("is_elected_again", [False, True])
def test_a_request_is_not_sent_in_a_term_whose_record_lacks_it(is_elected_again):
    sent, story = [], Story().see(1.0).hear(TargetSet(1.0, {A: 1}))
    (order,) = story.of(Create)

    class Hanging(Gateway):
        """Its first write fails, perhaps only after the next election."""

        writes = 0

        async def write_as_leader(self, term, orders):
            self.writes += 1
            if self.writes == 1:
                if is_elected_again:
                    self.term = hands._term = 2
                    hands.state = story.hear(TookOver(9.0, "t2", CapacityRecord())).state
                raise StoreUnavailable("as scripted")
            return await super().write_as_leader(term, orders)

    class Recorder(Warner):
        async def create(self, ask):
            sent.append(ask)
            return Granted(ask.request_id, ())

    gateway = Hanging(lambda: False, None)
    gateway.term = 1
    clock = SimpleNamespace(now=lambda: 100.0)
    hands = CapacityLoop(None, Recorder(), CapacityPolicy(), None, None, gateway, clock)
    hands._term, hands.state = 1, story.state
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(hands._create(order.ask))
    assert sent == ([] if is_elected_again else [order.ask])
