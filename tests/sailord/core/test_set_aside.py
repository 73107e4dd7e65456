"""Jobs whose records the store never takes, or that cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.model.commands import AbortGeneration, WriteGeneration, WriteJob
from sailord.core.model.events import Elected, GenerationWritten, JobWriteRejected
from sailord.core.model.phases import Closing, Held, Phase, Running, Waiting
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import why_queue_stands
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    NOW,
    OPENING,
    STARTING,
    STOPPING,
    TERM,
    A,
    B,
    G,
    Planning,
    act,
    active_of,
    job,
    node,
    order,
    state,
)

TOO_LONG = JobWriteRejected(NOW, JOB, "a transaction of 2000000 bytes")


@pytest.mark.parametrize("of", [OPENING, STOPPING, STARTING, Running(BEGAN), FROM_NOTHING])
def test_job_is_held_when_the_store_will_never_take_its_write(of: Phase | Planning):
    after, commands = act(state(of), TOO_LONG)
    (closing,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert (closing.record.state, closing.replaces) == ("closed", G)
    held, commands = act(after, GenerationWritten(NOW, closing.record))
    (written,) = [each for each in commands if isinstance(each, WriteJob)]
    assert written.job.state == "held"
    assert written.job.reason.endswith(TOO_LONG.why)
    assert act(held, TOO_LONG) == (held, ())


def test_agents_are_told_if_the_store_does_not_even_take_the_end_of_the_generation():
    held, commands = act(state(Closing("cancelled", "no more")), TOO_LONG)
    assert isinstance(active_of(held).phase, Held)
    assert AbortGeneration(JOB, G.number, G.members) in commands


def test_a_resume_between_two_rejected_writes_is_carried_out():
    """The end of the generation is rejected while an operator resumes the job."""
    before = state(Closing("held", "the store rejects it"), orders=(order("resume", JOB),))
    after, commands = decide(before, TOO_LONG)
    invariants.check(before, after, commands)
    assert AbortGeneration(JOB, G.number, G.members) in commands
    assert isinstance(active_of(after).phase, Waiting)


def test_rejected_write_of_a_job_without_the_cluster_changes_nothing():
    before = state()
    assert act(before, replace(TOO_LONG, job=JobId("other"))) == (before, ())


def test_no_job_gets_the_cluster_while_an_unreadable_one_may_have_it():
    queued = job(state="queued")
    elected = Elected(
        NOW, TERM, nodes=(node(A).record, node(B).record), jobs=(queued,), generations=()
    )
    taken, _ = act(State(), replace(elected, unreadable=frozenset({JobId("odd")})))
    assert taken.active is None
    assert why_queue_stands(taken) == (
        "sailord cannot read the records of odd, which may have the cluster"
    )
    free, _ = act(State(), elected)
    assert active_of(free).job == JOB
