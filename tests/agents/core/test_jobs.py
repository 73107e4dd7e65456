"""Which job an agent serves, and what it keeps of others."""

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
    UploadDone,
)
from agents.protocol.records import Fence, Holding, Point, Restore, Uploaded
from tests.agents.core.life import (
    JOB,
    NOW,
    OTHER,
    PEER,
    RUNS,
    SEALED,
    TERM,
    G,
    act,
    idle,
    state,
)

G4 = replace(G, number=4, restore=Restore(Point(40, 3), "memory"))
WITHOUT_US = replace(G4, members=(PEER,))
CLOSED = replace(G, state="closed")


def vote(step: int, of: int = 3) -> Uploaded:
    return Uploaded(Point(step, of), f"{of}-{step}", 1, "", (Holding(0, 0, 1),))


def test_the_agent_keeps_to_one_job_at_a_time() -> None:
    """What it heard, left, sealed and uploaded of one job is nothing to the next."""
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


def test_the_first_job_keeps_what_was_heard_before_it_was_known() -> None:
    after, _ = act(idle(job=None, record=None), GenerationRead(NOW, WITHOUT_US))
    assert (after.job, after.left, after.sealed) == (JOB, 3, SEALED)


def test_a_higher_term_is_kept_over_jobs() -> None:
    before = idle(heard=Fence(9, 3))
    after, _ = act(before, GenerationRead(NOW, replace(WITHOUT_US, job=OTHER, number=1)))
    assert after.heard == Fence(9, 0)
    unmoved, _ = act(state(heard=Fence(9, 3)), AbortReceived(NOW, JOB, Fence(TERM, 3)))
    assert unmoved.gang == RUNS


def test_snapshots_are_released_by_who_leads_for_the_job_at_hand() -> None:
    point = Point(40, 3)
    assert act(state(), ReleaseReceived(NOW, TERM, JOB, point))[1] == (
        ReleaseSnapshots(JOB, point, 3),
    )
    assert act(idle(), ReleaseReceived(NOW, TERM, JOB, point))[1] == (
        ReleaseSnapshots(JOB, point, 0),
    )
    assert act(state(), ReleaseReceived(NOW, TERM - 1, JOB, point))[1] == ()
    assert act(state(), ReleaseReceived(NOW, TERM, OTHER, point))[1] == ()


def test_a_job_that_is_over_is_swept_unless_its_workers_are_here() -> None:
    assert act(idle(), JobEnded(NOW, JOB))[1] == (DeleteJobSnapshots(JOB),)
    assert act(state(), JobEnded(NOW, JOB))[1] == ()
    assert act(state(), JobEnded(NOW, OTHER))[1] == (DeleteJobSnapshots(OTHER),)


def test_votes_are_told_until_they_are_below_what_is_committed() -> None:
    before = state(uploaded=(vote(30),))
    voted, _ = act(before, UploadDone(NOW, JOB, vote(40)))
    assert voted.uploaded == (vote(30), vote(40))
    twice, _ = act(voted, UploadDone(NOW, JOB, vote(40)))
    assert twice.uploaded == voted.uploaded
    after, _ = act(voted, GenerationRead(NOW, G, Point(40, 3)))
    assert after.uploaded == (vote(40),)
