"""The page's stream: documents for all watchers, and what one of them is sent of its job."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.records import JobId
from sailord.api.handlers import live
from sailord.api.handlers.live import EVENTS_FIRST, LOOK_S, SHARE_MAX, LiveDocuments, _Stream
from sailord.controller.step_rate import StepRate
from sailord.core.model.state import State
from sailord.core.sharing.parts import whole
from sailord.goodput.core.ledger import Ledger
from sailord.notify.feed import Feed, FeedEvent
from sailord.page.training_curve import CurvePoint, TrainingCurve, TrainingCurves
from sailord.planning.precomputed import NoPlan
from tests.sailord.api.answers.test_chosen_job import OTHER, PLAN, shared
from tests.sailord.core.states import JOB
from tests.sailord.page.made_up import live_context

ONE, TWO = JobId("one"), JobId("two")


def point(step: int) -> CurvePoint:
    return CurvePoint(100.0 + step, step, 0.5, None, 1)


class Watcher:
    """One stream, and the events that it was sent."""

    def __init__(self, chosen: JobId | None, feed: Feed, curves: TrainingCurves) -> None:
        self.sent: list[tuple[str, Any]] = []
        reply: Any = SimpleNamespace(write=self._write)
        cluster = SimpleNamespace(feed=feed, state=SimpleNamespace(term=1))
        api: Any = SimpleNamespace(cluster=cluster, curves=curves)
        self.stream = _Stream(api, reply, chosen)

    async def _write(self, data: bytes) -> None:
        kind, text = data.decode().strip().split("\n")
        self.sent.append((kind.removeprefix("event: "), json.loads(text.removeprefix("data: "))))

    async def told(self, document: dict[str, Any], kind: str) -> list[Any]:
        """Tell of a document; return what was sent of this kind."""
        self.sent.clear()
        await self.stream.tell(document)
        return [value for name, value in self.sent if name == kind]


def event(id_: int, job: JobId | None, kind: Any = "note") -> FeedEvent:
    return FeedEvent(id_, float(id_), kind, f"said {id_}", job=job)


async def test_a_watcher_is_sent_the_curve_of_the_job_that_is_shown() -> None:
    curves = TrainingCurves({job: TrainingCurve(job, [point(1)]) for job in (ONE, TWO)})
    watcher = Watcher(None, Feed(), curves)
    [found] = await watcher.told({"job": {"id": ONE}}, "samples")
    assert (found["job"], found["all"], len(found["rows"])) == (ONE, True, 1)
    curves.by_job[ONE].samples.append(point(2))
    [found] = await watcher.told({"job": {"id": ONE}}, "samples")
    assert (found["all"], [row[1] for row in found["rows"]]) == (False, [2])
    assert await watcher.told({"job": {"id": ONE}}, "samples") == []
    [found] = await watcher.told({"job": {"id": TWO}}, "samples")
    assert (found["job"], found["all"]) == (TWO, True), "another job is the first one now"


async def test_a_chosen_job_without_samples_has_an_empty_curve() -> None:
    curves = TrainingCurves({ONE: TrainingCurve(ONE, [point(1)])})
    [found] = await Watcher(TWO, Feed(), curves).told({}, "samples")
    assert (found["all"], found["rows"]) == (True, [])


async def test_a_flood_of_checkpoints_does_not_push_out_what_happened_before() -> None:
    """Of checkpoints, and of the parts of a reconfiguration, only the last is sent."""
    feed = Feed()
    feed.add(event(1, None, "node_lost"))
    feed.add(replace(event(2, ONE), is_detail=True))
    feed.add(event(3, ONE, "reconfigured"))
    for id_ in range(4, 2 * EVENTS_FIRST + 4):
        feed.add(event(id_, ONE, "checkpoint_committed"))
    feed.add(replace(event(1001, TWO, "job_held"), text="no budget"))
    feed.add(replace(event(1002, TWO, "transition"), text="held: no budget"))
    [found] = await Watcher(None, feed, TrainingCurves()).told({}, "events")
    assert [each["id"] for each in found] == [1, 3, 2 * EVENTS_FIRST + 3, 1002]


async def test_a_watcher_of_one_job_is_sent_its_events_and_those_of_nodes() -> None:
    feed = Feed()
    for id_ in range(1, 2 * EVENTS_FIRST + 1):
        feed.add(event(id_, TWO if id_ % 2 else ONE))
    feed.add(event(1001, None))
    feed.add(event(1002, ONE, "node_lost"))
    watcher = Watcher(TWO, feed, TrainingCurves())
    [found] = await watcher.told({}, "events")
    assert len(found) == EVENTS_FIRST
    assert [each["id"] for each in found][-2:] == [1001, 1002]
    assert {each["job"] for each in found[:-2]} == {TWO}
    feed.add(event(1003, ONE))
    assert await watcher.told({}, "events") == []
    [found] = await Watcher(None, feed, TrainingCurves()).told({}, "events")
    assert {each["job"] for each in found} == {ONE, TWO, None}


class Moment:
    """A clock that stands."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Moment:
    made = Moment()
    monkeypatch.setattr(live, "time", made)
    return made


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the documents are made of: two jobs that run."""
    parts = shared()

    async def plan_of(_: object, part: State) -> tuple[dict[str, Any], dict[str, Any]]:
        assert part.active is not None
        return PLAN, {}

    monkeypatch.setattr(live, "plan_of", plan_of)
    monkeypatch.setattr(live, "_surroundings", lambda _: live_context(Ledger(), tuple(parts.all())))
    cluster = SimpleNamespace(
        last_led=whole(parts),
        state=whole(parts),
        step_rate_of=lambda _: StepRate(),
        safe_point=lambda _: None,
        risks=lambda part: {"budget_at_risk": f"of {part.active.job}"},
        following=lambda id_: NoPlan("too few") if id_ == "a" else None,
    )
    return SimpleNamespace(cluster=cluster, timelines_seen={})


async def test_watchers_of_one_job_share_a_document_and_all_share_its_nodes(
    api: Any, clock: Moment
) -> None:
    documents = LiveDocuments()
    first, beside = await documents.look(api, None), await documents.look(api, OTHER)
    assert (first["job"]["id"], beside["job"]["id"]) == (JOB, OTHER)
    assert f"{OTHER}: of {OTHER}" in beside["problems"]
    assert first["nodes"] is beside["nodes"]
    needed = "without machine-a it waits: there is no plan for the other nodes"
    assert (first["job"]["needed"], beside["job"]["needed"]) == (needed, None)
    clock.now += LOOK_S / 2
    assert await documents.look(api, OTHER) is beside
    clock.now += LOOK_S
    assert await documents.look(api, OTHER) is not beside


async def test_a_document_that_takes_long_is_made_less_often_however_many_are_watched(
    api: Any, clock: Moment
) -> None:
    documents = LiveDocuments()
    first = await documents.look(api, None)
    documents.took_s = 10 * LOOK_S * SHARE_MAX
    clock.now += 5 * LOOK_S
    assert await documents.look(api, None) is first
    clock.now += 5 * LOOK_S
    assert await documents.look(api, None) is not first
