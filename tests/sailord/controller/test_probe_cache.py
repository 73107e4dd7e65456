"""What reports are answered with is worked out now and then, and for one generation only."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import JobId, Point
from sailord.controller.probe_cache import AGE_S, Releasing
from sailord.core.state import State
from tests.sailord.core.standing import NOW, A, B, G, job, node, report, state


def at(step: int, of: str = "job") -> State:
    """Both members have sealed one step of a job's generation."""
    id_ = JobId(of)
    nodes = (node(n, report(n, step=step, sealed=(step,), job=id_)) for n in (A, B))
    return state(None, *nodes, job=job(id=id_), generation=replace(G, job=id_), step=step)


def test_an_answer_stands_for_a_moment() -> None:
    releasing = Releasing()
    first = releasing.point(at(40), NOW)
    assert first is not None
    assert releasing.point(at(41), NOW + AGE_S / 2) == first
    assert releasing.point(at(41), NOW + AGE_S) == Point(41, 3) != first


def test_it_is_never_the_answer_for_another_job_or_generation() -> None:
    releasing = Releasing()
    assert releasing.point(at(40), NOW) == Point(40, 3)
    assert releasing.point(at(12, "other"), NOW) == Point(12, 3)
    assert releasing.point(replace(state(), active=None), NOW) is None
