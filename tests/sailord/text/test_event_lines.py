"""Events as lines: one for each reconfiguration, and one for repeats."""

from __future__ import annotations

from typing import Any

from sailord.text.event_lines import EndsOnce, fold


def event(kind: str, text: str, **about: Any) -> dict[str, Any]:
    return {"id": 1, "at": 0.0, "kind": kind, "text": text, "job": "j", **about}


LOSS = (
    event("node_lost", "a2 is lost: its lease expired", node="a2", job=None),
    event("transition", "a2 is lost: its lease expired", is_detail=True),
    event("note", "planning for 7 nodes", is_detail=True),
    event("generation_opened", "generation 2 is open", is_detail=True),
    event("reconfigured", "a2 lost → moved to 6 nodes, 0 steps lost, 0.6 s"),
)


def said(*events: dict[str, Any]) -> list[str]:
    return [line.said for line in fold(events)]


def test_a_reconfiguration_is_one_line():
    assert said(*LOSS) == ["a2 lost → moved to 6 nodes, 0 steps lost, 0.6 s"]


def test_a_lost_node_is_shown_until_the_job_has_moved():
    assert said(*LOSS[:-1]) == ["a2 is lost: its lease expired", "generation 2 is open"]


def test_a_reconfiguration_under_way_shows_its_last_part():
    asks = event("note", "planning for 7 nodes", is_detail=True)
    assert said(asks) == ["planning for 7 nodes"]
    assert said(asks, event("note", "stays: no better plan")) == ["stays: no better plan"]


def zone_lost(count: int) -> list[dict[str, Any]]:
    return [
        event("node_lost", f"c{n} is lost: its lease expired", node=f"c{n}", job=None)
        for n in range(count)
    ]


def test_many_lost_nodes_are_one_line_also_after_the_move_that_names_a_few():
    before = event("note", "step 20 is durable")
    assert said(*zone_lost(40), before) == ["c0, c1, c2, c3 and 36 more are lost", before["text"]]
    move = event("reconfigured", "c0, c1, c2, c3 and 36 more lost → moved to 6 nodes")
    assert said(*zone_lost(40), move) == ["c4, c5, c6, c7 and 32 more are lost", move["text"]]


def test_nodes_lost_hours_apart_are_shown_with_their_causes():
    lost = [each | {"at": 3600.0 * n} for n, each in enumerate(zone_lost(5))]
    assert said(*lost) == [each["text"] for each in lost]
    zone = [each | {"at": 20_000.0 + 20 * n} for n, each in enumerate(zone_lost(40)[5:])]
    assert said(*lost, *zone) == [*said(*lost), "c5, c6, c7, c8 and 31 more are lost"]


def test_a_few_lost_nodes_are_shown_with_their_causes():
    assert said(*zone_lost(4)) == [each["text"] for each in zone_lost(4)]


def test_a_node_that_no_reconfiguration_names_stays():
    other = event("node_lost", "a21 is lost: its lease expired", node="a21", job=None)
    assert said(other, *LOSS) == [other["text"], LOSS[-1]["text"]]


def test_repeats_are_one_line_with_their_count_and_last_time():
    full = [event("note", "checkpoint storage: no space") | {"at": float(n)} for n in range(6)]
    (*_, last) = fold([*full[:3], event("note", "other"), *full[3:]])
    assert (last.said, last.at) == ("checkpoint storage: no space (6 times)", 5.0)


def test_only_the_last_of_consecutive_checkpoints_is_shown():
    steps = [event("checkpoint_committed", f"step {n} is durable") for n in (20, 40, 60)]
    assert said(*steps) == ["step 60 is durable (3 checkpoints)"]


def test_repeats_are_shown_again_after_a_reconfiguration():
    assert said(event("note", "x"), *LOSS, event("note", "x")) == ["x", LOSS[-1]["text"], "x"]


def test_a_hold_and_its_transition_are_one_line():
    held, ended = event("job_held", "why"), event("job_finished", "done: why")
    assert said(held, event("transition", "held: why")) == ["held: why"]
    assert said(ended, event("transition", "done: why")) == ["done: why"]


def test_an_end_that_is_followed_is_told_once():
    ends = EndsOnce()
    events = (
        *(event("note", "x"), event("note", "x")),
        *(event("transition", "held: why"), event("job_held", "why")),
        *(event("transition", "held: why"), event("job_held", "why")),
        *(event("job_finished", "done: all"), event("transition", "done: all", job="other")),
        event("transition", "done: all"),
        *(event("transition", "held: why"), event("transition", "held: why")),
    )
    assert [ends.is_second(each) for each in events] == [
        *(False, False, False, True, False, True, False, False, True),
        *(False, False),  # Each waits for a second one of another kind.
    ]


def test_events_of_an_older_sailord_have_no_details():
    plain = [{k: v for k, v in each.items() if k != "is_detail"} for each in LOSS]
    assert len(said(*plain)) == 4


def test_each_order_has_a_line_though_an_opposite_one_lies_between():
    told = [
        event("order", text, node="a2") | {"at": float(at)}
        for at, text in enumerate(("draining a2", "withdrawing", "draining a2", "withdrawing"))
    ]
    assert said(*told) == [each["text"] for each in told]
