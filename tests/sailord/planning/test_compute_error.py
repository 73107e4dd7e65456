"""Compute times of ranks are judged by their own error bar, not by that of the iteration."""

from __future__ import annotations

import itertools

import pytest

from sailord.planning.plan_search import _busy
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.worlds import SEQUENCE, place, small_model, stage, world_of

ZONES = ("us-central1-a", "us-central1-b")


def test_waiting_for_links_does_not_change_the_bar_of_compute_times() -> None:
    job = Job("small", small_model(), global_batch=16, sequence=SEQUENCE, max_tp=4)
    caps = dict.fromkeys(itertools.permutations(ZONES, 2), 1e7)
    one, other = (place("A100-40", zone, node=zone) for zone in ZONES)
    plan = Plan(1, (Pipeline(16, (stage(0, 3, one), stage(3, 6, other))),))
    found = world_of(job, zone_caps=caps).estimator.estimate(plan)
    alone = Plan(1, (Pipeline(16, (stage(0, 6, one),)),))
    near = world_of(job).estimator.estimate(alone).provenance.relative_error
    assert found.provenance.relative_error != pytest.approx(near, abs=1e-3)
    assert _busy(job, plan, found).relative_error == pytest.approx(near, abs=1e-3)
