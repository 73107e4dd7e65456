"""The release point is cached for a moment, and for one generation only."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import JobId, Point
from sailord.controller.release_cache import AGE_S, ReleaseCache
from sailord.core.model.state import State
from tests.sailord.core.states import NOW, A, B, C, G, job, node, report, state


def at(step: int, of: str = "job") -> State:
    """A state in which both members have sealed one step."""
    id_ = JobId(of)
    nodes = (node(n, report(n, step=step, sealed=(step,), job=id_)) for n in (A, B))
    return state(None, *nodes, job=job(id=id_), generation=replace(G, job=id_), step=step)


def test_point_is_cached_for_a_moment() -> None:
    cache = ReleaseCache()
    first = cache.released(at(40), NOW)
    assert first is not None
    assert cache.released(at(41), NOW + AGE_S / 2) == first
    assert cache.released(at(41), NOW + AGE_S) == Point(41, 3) != first


def test_point_is_never_reused_for_another_job_or_generation() -> None:
    cache = ReleaseCache()
    assert cache.released(at(40), NOW) == Point(40, 3)
    assert cache.released(at(12, "other"), NOW) == Point(12, 3)
    assert cache.released(replace(state(), active=None), NOW) is None


def test_step_of_a_lone_node_is_not_safe_as_another_node_comes() -> None:
    cache = ReleaseCache()
    alone = node(A, report(A, sealed=(40,)))
    lost = node(B, report(B, sealed=()), lost_at=NOW - 1, why_lost="gone")
    before = state(None, alone, lost)
    assert (cache.released(before, NOW), cache.safe(before, NOW)) == (Point(40, 3), None)
    came = state(None, alone, lost, node(C, report(C, "idle", sealed=())))
    assert cache.safe(came, NOW + AGE_S / 2) is None
    copied = state(None, alone, lost, node(C, report(C, "idle", sealed=(40,))))
    assert cache.safe(copied, NOW + AGE_S) == Point(40, 3)
