"""Random plans that recompute something and just fit their devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from simulator.cluster.place_facts import PlaceFacts
from simulator.spec.job import RecomputePolicy
from simulator.spec.plan import Plan
from tests.simulator.worlds import World, with_shares


def any_recomputation(rng: random.Random, plan: Plan) -> tuple[Plan, RecomputePolicy]:
    """The plan with another recomputation, and a policy that allows it."""
    policy: RecomputePolicy = rng.choice(["auto", "auto", "none", "full"])
    if policy == "auto":
        return with_shares(rng, plan), policy
    pipelines = (
        replace(each, stages=tuple(replace(stage, recompute=policy) for stage in each.stages))
        for each in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines)), policy


@contextmanager
def just_fitting(rng: random.Random, world: World, plan: Plan) -> Iterator[None]:
    """In two of three cases no device has more memory than the fullest one of the plan needs."""
    if rng.random() < 1 / 3:
        yield
        return
    most = max(one.total for row in world.estimator.estimate(plan).memory for one in row)
    with patch.object(PlaceFacts, "capacity_bytes", return_value=most * (1 + 1e-9)):
        yield
