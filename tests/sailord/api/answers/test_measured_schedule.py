"""What ranks have kept of a step is put on one axis, without comparing their clocks."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import KeptStep, KeptSteps
from sailord.api.answers.timeline import measured_schedule

PREDICTED = {
    "pipelines": [{"numbers": [2, 3], "groups": [{"stage": 0, "rank": 4}, {"stage": 1, "rank": 6}]}]
}
STEP = KeptStep(8, 100.0, 5.0, (("F", 0.5, 1.0, 0), ("B", 3.5, 4.0, 0)), (5.25, 5.5))


def kept(*steps: KeptStep, now: float = 101.5) -> KeptSteps:
    return KeptSteps(steps, now)


def test_ranks_are_aligned_where_they_read_the_votes_result() -> None:
    # The second rank began its step later, after a longer update, and its clock is far off.
    passes = (("F", 0.5, 1.0, 0), ("B", 1.5, 2.0, 0))
    late = KeptStep(8, 9e9, 4.0, passes, (4.0, 4.75), ((2.0, 2.5), (2.25, 6.0)))
    found = measured_schedule(PREDICTED, {4: kept(STEP), 6: kept(late, now=9e9 + 2)})
    assert found is not None
    (pipeline,) = found.pipelines
    assert (found.step, found.age_s, found.length_s, pipeline.number) == (8, 1.5, 7.0, 2)
    first, second = pipeline.groups
    assert (first.passes, first.update, first.sync) == (STEP.passes, STEP.update, ())
    assert second.passes == (("F", 1.5, 2.0, 0), ("B", 2.5, 3.0, 0))
    assert second.update == (5.0, 5.75)
    assert second.sync == ((3.0, 3.5), (3.25, 7.0)), "sums may end after the update of others"


def test_a_rank_that_does_not_answer_leaves_its_row_out_with_the_reason() -> None:
    found = measured_schedule(PREDICTED, {4: kept(STEP), 6: "b1: timed out"})
    assert found is not None
    first, second = found.pipelines[0].groups
    assert first.passes
    assert (second.passes, second.update, second.why_none) == ((), (), "b1: timed out")


def test_the_newest_step_that_most_ranks_have_is_shown() -> None:
    newer = replace(STEP, step=16)
    found = measured_schedule(PREDICTED, {4: kept(STEP, newer), 6: kept(STEP)})
    assert found is not None
    assert found.step == 8
    found = measured_schedule(PREDICTED, {4: kept(STEP, newer), 6: kept(newer)})
    assert found is not None
    assert found.step == 16
    found = measured_schedule(PREDICTED, {4: kept(newer), 6: kept(STEP)})
    assert found is not None
    assert [group.why_none for group in found.pipelines[0].groups] == ["", "has not kept step 16"]


def test_there_is_no_schedule_before_a_rank_has_kept_a_step() -> None:
    assert measured_schedule(PREDICTED, {4: "no step is kept", 6: kept()}) is None
