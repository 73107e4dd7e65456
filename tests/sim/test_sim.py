"""Whole lives of a simulated cluster under faults at random moments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import the_first_quick
from tests.sim.lives import run_life

SEEDS = int(os.environ.get("SEEDS", "100"))
FIRST = int(os.environ.get("FIRST", "1"))
CHUNK = 10
SEEDS_OF_BUGS = (935, 1035, 1363, 1375, 1695, 91215, 91415, 301704)
"""Seeds that once found a bug, in addition to the usual ones. Their faults may differ now, since
the world draws more numbers; what they found has a test of its own as well."""
TELL = "from tests.sim.lives import run_life; print(run_life(3).checker.account())"


@pytest.mark.sim
@pytest.mark.parametrize("first", the_first_quick(range(FIRST, FIRST + SEEDS, CHUNK), quick=2))
def test_simulated_lives_keep_the_invariants_and_settle(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        run_life(seed)


@pytest.mark.sim
@pytest.mark.parametrize("seed", SEEDS_OF_BUGS)
def test_seeds_that_once_failed_are_clean(seed: int) -> None:
    run_life(seed)


@pytest.mark.sim
def test_survivors_are_awaited_and_the_step_that_they_sealed_is_kept() -> None:
    """Guards that lives with slow seals check something."""
    checker = run_life(8).checker
    assert checker.awaited
    assert checker.kept


@pytest.mark.sim
def test_contradicted_nodes_stay_out_and_wrong_steps_are_done_again() -> None:
    """Guards that lives with wrong bits check something."""
    checker = run_life(69).checker
    assert checker.quarantined
    assert checker.undone


@pytest.mark.slow
def test_seed_determines_the_life_under_any_hash_seed() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", TELL],
            env={**os.environ, "PYTHONHASHSEED": str(hashes)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hashes in (1, 2, 3)
    }
    assert len(told) == 1
    assert " runs after " in told.pop()
