"""A job's moves: cause, cost and phases of each, in at most 100 columns."""

from __future__ import annotations

from typing import Any

from sailord.text.cluster_text import moves_text
from sailord.text.units import clock, timestamp

PHASES = ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")
LOSS: dict[str, Any] = {
    **{"at": 0.0, "kind": "loss", "generation": 2, "steps_lost": 1, "downtime_s": 4.5},
    **{"predicted_s": 3.0, "total_s": 5.0, "usd": 1.25, "reason": "a2 is lost: its lease expired"},
    **{"phases": [[name, 12.25] for name in PHASES], "predicted": [["plan", 0.5]]},
}


def told(move: dict[str, Any]) -> str:
    return moves_text({"moves": [move], "store_away_since": None})


def test_a_move_tells_its_cause_its_cost_and_its_phases():
    assert told(LOSS).splitlines() == [
        f"began {timestamp(0.0)}, ended {clock(5.0)}  loss → generation 2: a2 lost",
        "  1 step lost, $1.25, downtime 4.50 s (predicted 3.00 s), 5.00 s in all",
        "  took      detect 12.25, plan 12.25, quiesce 12.25, fetch 12.25, rebuild 12.25,"
        " verify 12.25, first",
        "            step 12.25",
        "  predicted plan 0.50",
    ]
    assert max(map(len, told(LOSS).splitlines())) <= 100


def test_a_planned_move_tells_how_long_the_job_trained():
    planned = told(LOSS | {"kind": "notice", "is_planned": True}).splitlines()[1]
    assert planned.endswith("5.00 s in all, it trained until a step ended in quiesce")
    assert "it trained" not in told(LOSS | {"is_planned": False})


def test_a_move_of_less_than_a_cent_is_not_free():
    assert "1 step lost, $0.004, downtime" in told(LOSS | {"usd": 0.0042})


def test_a_start_interrupts_nothing():
    line = told(LOSS | {"kind": "start"}).splitlines()[1]
    assert line == "  5.00 s in all"


def test_a_move_without_a_known_price_has_no_cost():
    assert "$" not in told(LOSS | {"usd": None})
