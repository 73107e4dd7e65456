"""The list of a job's checkpoints, as ``checkpoint ls`` prints it."""

from __future__ import annotations

from typing import Any

from sailord.text.checkpoint_text import checkpoints_text
from sailord.text.units import timestamp

EACH: dict[str, Any] = {
    **{"step": 1700, "generation": 2, "bytes": 95232, "samples": 27200, "is_durable": False},
    **{"is_pinned": False, "role": "older", "at": 1e9, "label_tokens": 0},
}
ALL: dict[str, Any] = {
    "job": "tale", "uri": "file:///kept", "unreadable": [], "unfinished_bytes": 0, "trouble": "",
    "keep": 3,
}  # fmt: skip


def listed(*rows: dict[str, Any], **about: Any) -> list[str]:
    return checkpoints_text({**ALL, "checkpoints": rows, **about}).splitlines()


def test_steps_are_printed_as_other_commands_take_them() -> None:
    header, _, row, *_ = listed(EACH)
    assert header.split() == ["step", "generation", "when", "bytes", "samples", "state"]
    assert row.split()[0] == "1700"
    assert timestamp(1e9) in row
    assert row.endswith("older, usable")


def test_each_row_tells_whether_the_job_would_resume_from_it() -> None:
    newest, left = EACH | {"role": "newest", "is_pinned": True}, EACH | {"role": "discarded"}
    rows = listed(left, newest)[2:4]
    assert rows[0].endswith("discarded by a rollback")
    assert rows[1].endswith("newest: the job resumes from it, pinned")
    ordered = EACH | {"role": "ordered"}
    assert listed(ordered)[2].endswith("the job resumes from it: a rollback was ordered")


def test_a_newer_step_in_memory_is_where_the_job_resumes() -> None:
    newest = EACH | {"role": "newest"}
    lines = listed(newest, step_in_memory=1707)
    assert lines[2].endswith("  newest")
    assert (
        "nodes keep step 1707 in memory: the job resumes from it, and from the newest checkpoint "
        "if these nodes are lost"
    ) in lines
    assert listed(newest, step_in_memory=None) == listed(newest)


def test_list_of_checkpoints_shows_how_many_are_kept() -> None:
    assert "the last 3 are kept ([checkpoint] keep), and pinned ones" in listed(EACH)


def test_no_row_means_no_checkpoint_only_if_none_was_durable() -> None:
    assert listed()[0] == "no checkpoint yet"
    said = "none is found there, though step 20 was durable: was it deleted, or is its storage not"
    assert listed(durable_step=20)[0].startswith(said)


def test_list_of_checkpoints_ends_with_what_can_be_done_with_one() -> None:
    last = listed(EACH)[-1]
    assert "sailorctl checkpoint rollback tale STEP" in last
    assert "sailorctl checkpoint verify tale STEP" in last
    assert "STEP" not in listed()[-1]
