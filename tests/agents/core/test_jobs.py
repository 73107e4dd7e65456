"""Decisions about the job that an agent serves."""

from __future__ import annotations

from dataclasses import replace

from agents.core.model import (
    AbortReceived,
    DeleteJobSnapshots,
    GenerationRead,
    JobEnded,
    ReleaseReceived,
    ReleaseSnapshots,
    SnapshotsChanged,
    Ticked,
    UploadDone,
)
from agents.protocol.records import Fence, Point
from tests.agents.core.life import (
    CLOSED,
    JOB,
    NOW,
    OTHER,
    RUNS,
    SEALED,
    TERM,
    WITHOUT_US,
    G,
    act,
    idle,
    said,
    state,
    vote,
)


def test_the_next_job_starts_without_the_state_of_the_last() -> None:
    """Fence, left generation, snapshots and uploads are reset."""
    before = idle(record=CLOSED, uploaded=(vote(40),), trouble="it is full")
    after, _ = act(before, GenerationRead(NOW, replace(WITHOUT_US, job=OTHER, number=1)))
    assert (after.job, after.heard, after.left) == (OTHER, Fence(TERM, 1), 0)
    assert (after.sealed, after.uploaded, after.trouble) == ((), (), "")
    again, _ = act(after, SnapshotsChanged(NOW, SEALED, JOB))
    assert again.sealed == ()
    again, _ = act(after, SnapshotsChanged(NOW, SEALED, OTHER))
    assert again.sealed == SEALED
    again, _ = act(after, UploadDone(NOW, JOB, vote(40)))
    assert again.uploaded == ()


def test_a_node_without_which_the_job_goes_on_reports_no_trouble_with_its_copies() -> None:
    """Nothing would ever end it; that of a held job is of use."""
    for before, told in (
        (state(trouble="no replica"), "no replica"),
        (idle(record=CLOSED, trouble="no replica"), "no replica"),
        (idle(record=WITHOUT_US, trouble="no replica"), ""),
    ):
        (report,) = said(before, Ticked(NOW + 1))
        assert report.trouble == told


def test_the_first_job_keeps_the_fence_that_was_seen_before_it() -> None:
    after, _ = act(idle(job=None, record=None), GenerationRead(NOW, WITHOUT_US))
    assert (after.job, after.left, after.sealed) == (JOB, 3, SEALED)


def test_the_highest_term_is_kept_over_jobs() -> None:
    before = idle(heard=Fence(9, 3))
    after, _ = act(before, GenerationRead(NOW, replace(WITHOUT_US, job=OTHER, number=1)))
    assert after.heard == Fence(9, 0)
    unmoved, _ = act(state(heard=Fence(9, 3)), AbortReceived(NOW, JOB, Fence(TERM, 3)))
    assert unmoved.gang == RUNS


def test_only_the_leader_releases_snapshots_and_only_of_the_present_job() -> None:
    point = Point(40, 3)
    assert act(state(), ReleaseReceived(NOW, TERM, JOB, point))[1] == (
        ReleaseSnapshots(JOB, point, 3),
    )
    assert act(idle(), ReleaseReceived(NOW, TERM, JOB, point))[1] == (
        ReleaseSnapshots(JOB, point, 0),
    )
    assert act(state(), ReleaseReceived(NOW, TERM - 1, JOB, point))[1] == ()
    assert act(state(), ReleaseReceived(NOW, TERM, OTHER, point))[1] == ()


def test_snapshots_of_an_ended_job_are_deleted_unless_its_workers_run() -> None:
    assert act(idle(), JobEnded(NOW, JOB))[1] == (DeleteJobSnapshots(JOB),)
    assert act(state(), JobEnded(NOW, JOB))[1] == ()
    assert act(state(), JobEnded(NOW, OTHER))[1] == (DeleteJobSnapshots(OTHER),)


def test_uploads_are_reported_until_a_newer_checkpoint_is_committed() -> None:
    before = state(uploaded=(vote(30),))
    voted, _ = act(before, UploadDone(NOW, JOB, vote(40)))
    assert voted.uploaded == (vote(30), vote(40))
    twice, _ = act(voted, UploadDone(NOW, JOB, vote(40)))
    assert twice.uploaded == voted.uploaded
    after, _ = act(voted, GenerationRead(NOW, G, Point(40, 3)))
    assert after.uploaded == (vote(40),)
