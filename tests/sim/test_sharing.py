"""Lives in which several jobs share the cluster, and nodes go from one to another under faults."""

from __future__ import annotations

import pytest

from tests.conftest import the_first_quick
from tests.sim.lives import run_life


@pytest.mark.sim
@pytest.mark.parametrize("seed", the_first_quick(range(1, 81), quick=3))
def test_jobs_that_share_keep_the_invariants_and_settle(seed: int) -> None:
    run_life(seed, sharing=2 + seed % 2)


@pytest.mark.sim
def test_nodes_change_hands() -> None:
    """Guards that these lives check something."""
    checker = run_life(4, sharing=2).checker
    handed = [line.text for line in checker.lines if ": handed to " in line.text]
    assert len(handed) >= 2
    assert {"job", "job-1"} <= {job for job, _ in checker.opened}
