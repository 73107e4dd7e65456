"""Faults injected into ranks that train, and who is blamed; ``hang_table`` injects hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.distributed.hang_runs import KINDS, Fault, Told, judge, run_clean, run_fault
from tests.worker.distributed.hang_table import missing, read, table

PLACE = "in data of step 2"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)), ids=[*KINDS])
def test_culprit_of_an_injected_fault_is_named_by_all_ranks(number: int) -> None:
    verdict = run_fault(number)
    assert verdict.is_right, verdict


@pytest.mark.slow
def test_clean_steps_blame_nobody() -> None:
    found = run_clean(0, 60)
    assert found.alarms == []


@pytest.mark.parametrize(
    ("kind", "ranks", "blamed", "text", "is_right"),
    [
        ("stall", (2,), (2,), f"rank 2 has not arrived ({PLACE})", True),
        ("stall", (2,), (1,), f"rank 1 has not arrived ({PLACE})", False),
        ("stall", (2,), (2,), "rank 2 has not arrived (in vote of step 1)", False),
        ("death", (2,), (), "the vote: connection closed", False),
        ("slow link", (0, 1), (0, 1, 2), "all: the link between them is slow", True),
        ("slow link", (0, 1), (1, 2), "all: the link between them is slow", False),
        ("circle", (2, 0), (0, 2), "ranks (0, 2) wait for each other (x)", True),
        ("circle", (2, 0), (0, 1, 2), "ranks (0, 1, 2) wait for each other (x)", False),
        ("other order", (2,), (0, 1), "ranks (0, 1) wait for each other (x)", False),
    ],
)
def test_blame_counts_as_right_only_if_it_names_the_culprit_and_where(
    kind, ranks, blamed, text, is_right
):
    told = Told(PLACE, 10.0, 0.1, {0: (blamed, text, 13.0)})
    verdict = judge(Fault(kind, ranks, 0.5), 4, told)
    assert (verdict.is_right, verdict.named_s, len(verdict.wrong)) == (is_right, 3.0, not is_right)
    assert not judge(Fault(kind, ranks, 0.5), 4, Told(PLACE, 10.0)).is_right, "no rank blamed any"


def test_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    done = [{"fault": 0}, {"clean": 0}, {"fault": 1}]
    assert list(missing(done, 3, 1000)) == [("clean", 1), ("fault", 2)]
    older = tmp_path / "older.jsonl"
    older.write_text('{"fault": 0, "voices": 3}\n{"clean": 0}\n', encoding="utf-8")
    assert read(older) == [{"fault": 0, "verdicts": 3}, {"clean": 0}]


def test_false_alarms_and_wrong_blames_are_shown() -> None:
    clean = {"clean": 0, "steps": 500, "alarms": ["rank 0: x"], "longest_wait_s": 4.0}
    wrong = {
        "fault": 0, "kind": "stall", "place": PLACE, "verdicts": 2, "right": 1, "named_s": 3.1,
        "wrong": ["rank 1: y"],
    }  # fmt: skip
    lines = list(table([clean, wrong]))
    assert "| stall | 1 | 0 | 2 | 1 | 3.1 s, 3.1 s |" in lines
    assert "500 clean steps: 1 alarms; the longest wait took 4.00 s" in lines
    assert f"fault 0 (stall {PLACE}): rank 1: y" in lines
