"""The rows of letters of a step, from known times."""

from __future__ import annotations

from typing import Any

from sailord.text.schedule_text import WIDTH, schedule_text


def group(
    stage: int, passes: list[list[Any]], update: list[float], *sync: list[float]
) -> dict[str, Any]:
    return {
        **{"stage": stage, "layers": [3 * stage, 3 * stage + 3], "gpu": "A100-40", "tp": 2},
        **{"zone": "z", "node": f"n{stage}", "passes": passes, "update": update, "sync": sync},
    }


PREDICTED = {
    "iteration_s": 6.0,
    "shapes": 2,
    "pipelines": [
        {
            "numbers": [0, 2],
            "groups": [
                group(0, [["F", 0.0, 2.0, 0], ["B", 3.0, 5.0, 0]], [5.0, 5.5], [4.0, 5.0]),
                group(1, [["F", 2.0, 2.5, 0], ["B", 2.5, 3.0, 0]], [5.0, 6.0], [2.8, 4.0]),
            ],
        }
    ],
}


def rows(text: str, kind: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.strip().startswith(kind)]


def test_a_predicted_step_is_drawn_in_proportion() -> None:
    text = schedule_text({"timeline": PREDICTED, "measured": None, "why_none": ""})
    assert rows(text, "predicted") == [
        "F" * 20 + "." * 10 + "B" * 20 + "U" * 5 + "." * 5,
        "." * 20 + "F" * 5 + "B" * 5 + "S" * 10 + "." * 10 + "U" * 10,
    ], "sums show where nothing is computed"
    assert "predicted to take 6.0 s; none was measured yet" in text
    assert "each letter is 100 ms" in text
    assert "pipeline 0, and 1 more like it" in text
    assert "stage 1, layers 3 to 5, 2 x A100-40 of n1" in text
    assert "1 more pipelines, which differ from these, are not shown" in text


def test_a_measured_step_stands_below_on_the_same_axis() -> None:
    measured = {
        **{"step": 1200, "age_s": 3.0, "length_s": 12.0},
        "pipelines": [
            {
                "number": 0,
                "groups": [
                    {"passes": [["F", 0.0, 6.0, 0], ["B", 6.0, 11.0, 0]], "update": [],
                     "sync": [[9.0, 10.0], [10.0, 12.0]], "why_none": ""},
                    {"passes": [], "update": [], "sync": [], "why_none": "n1: it does not answer"},
                ],
            }
        ],
    }  # fmt: skip
    text = schedule_text({"timeline": PREDICTED, "measured": measured, "why_none": ""})
    assert rows(text, "predicted")[0] == "F" * 10 + "." * 5 + "B" * 10 + "UU" + "." * 33
    assert rows(text, "measured")[0] == "F" * 30 + "B" * 25 + "S" * 5
    assert "measured  n1: it does not answer" in text
    assert "step 1,200 took 12.0 s, 3.0 s ago" in text
    assert max(map(len, text.splitlines())) <= WIDTH + 20


def test_a_stage_that_computes_little_is_not_drawn_as_one_that_does_nothing() -> None:
    short = group(0, [["F", 0.0, 0.01, 0], ["B", 3.0, 3.01, 0]], [5.0, 5.01])
    short["node"] = "a1.97b96d6e.1795894117085"
    pipeline = PREDICTED["pipelines"][0] | {"groups": [short]}
    found = PREDICTED | {"pipelines": [pipeline]}
    text = schedule_text({"timeline": found, "measured": None, "why_none": ""})
    assert rows(text, "predicted") == ["f" + "." * 29 + "b" + "." * 19 + "u" + "." * 9]
    assert "small letters: less than half of their time" in text
    assert "of a1\n" in text, "not the id of its present life"


def test_what_has_no_schedule_says_why() -> None:
    assert schedule_text({"timeline": None, "measured": None, "why_none": "it is away"}) == (
        "there is no schedule: it is away"
    )
