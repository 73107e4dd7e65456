"""The document behind the page: what changes in it, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.protocol.records import ComputeTimes, Report
from sailord.api.answers.live import BUSY_S, DocumentCaches, cluster_part, live_document
from sailord.core.model.state import State
from sailord.goodput.core.ledger import Ledger, fold
from sailord.goodput.core.usage_sample import Renting, sample_usage
from sailord.page.merge_patch import merge_patch
from tests.sailord.core.states import NOW, A, B, generation, node, report, state
from tests.sailord.page.made_up import job_context, live_context

PLAN = {
    "pipelines": [
        {"micro_batches": 2, "stages": [{"layers": [s, s + 1], "tp": 2} for s in range(2)]}
    ]
}
SCHEDULE = {"pipelines": [{"numbers": [0], "groups": [{"rank": 0}, {"rank": 2}]}]}


def busy(said: Report, *seconds: float) -> Report:
    ranks = (0, 1) if said.node == A else (2, 3)
    return replace(said, busy=tuple(zip(ranks, seconds, strict=True)))


def at(later_s: float, seconds: float, **others: Any) -> State:
    """Ranks whose compute time is measured anew at each step."""
    here = state(
        None,
        node(A, busy(report(A), seconds, 0.3)),
        node(B, busy(report(B), 2 * seconds, 0.3)),
        generation=generation(A, B, busy=ComputeTimes((0.2, 0.2, 0.4)), **others),
    )
    return replace(here, now=NOW + later_s)


def document(
    of: State, kept: DocumentCaches, schedule: dict[str, Any] | None = SCHEDULE
) -> dict[str, Any]:
    return live_document(of, kept, live_context(Ledger()), job_context(PLAN, schedule))


def test_measured_times_are_those_beside_the_schedule_with_two_digits() -> None:
    found = document(at(0, 0.23456), DocumentCaches())
    assert found["busy"] == {"0": [0.23, 0.2], "2": [0.47, 0.4]}
    assert document(at(0, 0.23456), DocumentCaches(), None)["busy"] == {}


def test_a_time_without_a_prediction_is_shown_alone() -> None:
    here = at(0, 0.2)
    assert here.active is not None
    bare = replace(here, active=replace(here.active, generation=generation(A, B)))
    assert document(bare, DocumentCaches())["busy"] == {"0": [0.2, None], "2": [0.4, None]}


def test_new_measured_times_are_sent_every_few_seconds_only() -> None:
    kept = DocumentCaches()
    first = document(at(0, 0.2), kept)
    assert merge_patch(first, document(at(BUSY_S - 0.1, 0.3), kept)) == {}
    later = document(at(BUSY_S, 0.3), kept)
    assert merge_patch(first, later) == {"busy": {"0": [0.3, 0.2], "2": [0.6, 0.4]}}


def test_a_new_generation_has_its_own_measured_times_at_once() -> None:
    kept = DocumentCaches()
    document(at(0, 0.2), kept)
    assert document(at(1, 0.3, number=4), kept)["busy"] == {}, "old reports speak of another one"


def test_dollars_and_share_are_the_ledgers_and_unpriced_time_is_shown() -> None:
    ledger = Ledger()
    for later_s in (0, 1800, 3600):
        here = replace(state(None), now=NOW + later_s)
        price = {A: 2.0, B: None}
        ledger = fold(ledger, sample_usage(here, lambda r, p=price: p[r.id], Renting()))
    shown = cluster_part(state(None), DocumentCaches(), live_context(ledger))["goodput"]
    assert shown["usd"] == 2.0
    assert shown["unpriced_gpu_s"] == 3600
    assert shown["goodput"] == 0.0
