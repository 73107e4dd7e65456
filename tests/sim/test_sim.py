"""Whole lives of a cluster under faults at random moments: nothing breaks, and it comes to rest."""

from __future__ import annotations

import os

import pytest

from sailord.model import Held, Planning, Running
from tests.sim.faults import Trouble
from tests.sim.world import GENTLE, Faults, World

SEEDS = int(os.environ.get("SEEDS", "25"))
FIRST = int(os.environ.get("FIRST", "1"))
TROUBLE_S = 120.0
CALM_S = 90.0
CHUNK = 25


def live(seed: int, faults: Faults) -> World:
    """Let a world live through trouble and then through calm."""
    world = World(seed, faults)
    try:
        world.clock.after(10.0, lambda: Trouble(world, until=TROUBLE_S) and None)
        world.clock.run_until(TROUBLE_S + CALM_S)
        world.checker.verify()
        rests(world)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n{world.checker.account()}") from error
    return world


def rests(world: World) -> None:
    """Once faults stop, one head leads, and the job runs, or is held for a reason."""
    leaders = [head for head in world.heads.values() if head.state.term is not None]
    assert len(leaders) == 1, f"{len(leaders)} heads lead in the end"
    active = leaders[0].state.active
    assert active is not None, f"the job is gone: {leaders[0].state.jobs}"
    if isinstance(active.phase, Held) or len(world.fit_for_work()) < 2:
        return
    assert isinstance(active.phase, Running | Planning), f"stuck in {active.phase}"
    assert active.generation is not None
    at, _ = world.checker.steps[active.generation.number][-1]
    assert at > world.clock.now - 5, f"no step since {at}"


@pytest.mark.sim
@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_anything_may_go_wrong(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        live(seed, Faults())


@pytest.mark.sim
@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS // 5, CHUNK))
def test_machines_that_come_and_go_are_nobodys_failure(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS // 5)):
        world = live(seed, GENTLE)
        assert world.checker.failures_max == 0, f"seed {seed}\n{world.checker.account()}"
