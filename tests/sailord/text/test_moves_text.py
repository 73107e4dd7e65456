"""The table of a job's moves: what each took, and what it cost."""

from __future__ import annotations

from typing import Any

from sailord.text.cluster_text import moves_text

LOSS: dict[str, Any] = {
    **{"at": 0.0, "kind": "loss", "generation": 2, "steps_lost": 1, "downtime_s": 4.5},
    **{"predicted_s": 3.0, "total_s": 5.0, "usd": 1.25},
    **{"phases": [["plan", 0.25]], "predicted": [["plan", 0.5]]},
}


def row(**about: Any) -> list[str]:
    return moves_text([LOSS | about]).splitlines()[-1].split()


def test_a_move_shows_its_cost_where_the_price_is_known():
    header = moves_text([LOSS]).splitlines()[0].split()
    assert header[:5] == ["when", "kind", "to", "lost", "cost"]
    assert row()[2:8] == ["loss", "2", "1", "step", "$1.25", "4.50"]
    assert row(usd=None)[6] == "-"
    assert [each for each in row(kind="start") if each == "-"] == ["-"] * 4


def test_a_move_that_an_older_sailord_tells_has_no_cost():
    old = {name: value for name, value in LOSS.items() if name != "usd"}
    assert moves_text([old]) == moves_text([LOSS | {"usd": None}])
