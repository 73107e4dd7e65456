"""Random scripts of a simulated cloud against the capacity decisions alone.

``test_gce_random`` has the provider and the fake Google Cloud between them.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from sailord.capacity.core.boots import why_stopped
from sailord.capacity.core.budget import spent_usd
from sailord.capacity.core.model import BootsRetried, CapacityPolicy, TargetSet
from sailord.capacity.core.supply import supply
from tests.conftest import the_first_quick
from tests.gce.cloud_instance import POOLS
from tests.gce.simulated_cloud import RUN_S, Run

SEEDS_OF_BUGS = (110242, 110818)
"""A zone that is not listed for minutes after a request was sent there; then a leader dies, too."""
SCRIPTS = int(os.environ.get("SAILOR_SCRIPTS", "30"))
"""``test_gce_random`` plays further ones, with all of this in them and a cloud."""
GROUPS = 10
UNSEEN_USD = 0.2
"""What the dearest machine costs while a request may be in doubt."""


def keeps_books(run: Run, seed: int) -> None:
    """Assert that no more was spent than allowed, and that the books say what."""
    assert run.overspent <= 0, (seed, run.overspent, run.policy)
    assert run.doubled == 0, (seed, run.doubled, "requested again")
    assert run.unspent_usd <= 1e-9, (seed, run.unspent_usd, "a budget ended for money never spent")
    assert run.too_dear_s <= run.policy.look_s, seed
    # Only what came and went while no sailord was there is in no book.
    assert spent_usd(run.state) == pytest.approx(run.bill(of_known=True), abs=1e-6), seed
    assert run.bill() - run.bill(of_known=True) <= run.away_usd + UNSEEN_USD, seed


def play(seed: int) -> Run:
    """Forty minutes of trouble, and then calm."""
    usd_max = (None, 4.0, 12.0)[seed % 3]
    per_hour = (None, 20.0)[seed % 2]
    policy = CapacityPolicy(
        usd_per_hour_max=per_hour, usd_max=usd_max, surplus_s=60.0, boot_s=240.0
    )
    run = Run(seed, policy)
    run.begin()
    run.run(2400.0)
    run.calm = True
    return run


def judge(seed: int) -> None:
    """Play a script, settle it, and look at what is left."""
    run = play(seed)
    # The target is available now: exactly its machines are made.
    run.want = Counter({POOLS[0]: 2, POOLS[4]: 1})
    run.stock = dict.fromkeys(POOLS, 50)
    run.limits = dict.fromkeys(run.limits, 200)
    if not run.leads:
        run.run(86_400.0)
    run.feed(BootsRetried(run.now))
    run.run(RUN_S + 1500.0)  # No instance of the trouble is left.
    if not run.state.stop and run.policy.usd_max is None:
        up = Counter(each.instance.pool for each in run.instances.values() if each.ends_at is None)
        cooldowns = {p: r for p, r in run.state.cooldowns.items() if r.until > run.now}
        missing = {p for p, count in run.want.items() if up[p] < count}
        assert missing <= cooldowns.keys(), (seed, up, run.said[-10:])
        assert all(up[p] <= run.want[p] for p in up), (seed, up, run.want)
        assert supply(run.state) == +up, seed
    run.works, run.want = False, Counter()
    run.run(600.0)
    assert run.instances == {}, (seed, "left over")
    assert run.state.instances == {}, seed
    assert run.state.asks == {}, seed
    assert max(run.sent.values(), default=0) <= 1, (seed, "sent twice")
    assert all(run.made[id_] <= ask.count for id_, ask in run.asked.items()), seed
    keeps_books(run, seed)


@pytest.mark.parametrize("seed", SEEDS_OF_BUGS)
def test_scripts_that_once_failed_keep_all_invariants(seed):
    judge(seed)


@pytest.mark.slow
def test_machines_that_never_boot_are_not_rented_for_ever():
    run = Run(1, CapacityPolicy(boot_s=600.0))
    run.stock, run.limits = dict.fromkeys(POOLS, 50), dict.fromkeys(run.limits, 200)
    run._rotten_until = dict.fromkeys(POOLS, float("inf"))
    run.want = Counter({POOLS[3]: 4, POOLS[7]: 4})
    run.fail_at_random = run.plan = lambda: None
    run.begin()
    run.feed(TargetSet(run.now, dict(run.want)))
    run.run(86_400.0)
    assert sum(run.made.values()) == run.policy.boot_failures_max
    assert run.instances == {}
    assert all("no agent registered within 600 s" in why_stopped(run.state, p) for p in run.want)
    run._rotten_until.clear()
    run.calm = True
    run.feed(BootsRetried(run.now))
    run.run(1200.0)
    assert supply(run.state) == run.want


@pytest.mark.parametrize("group", the_first_quick(range(GROUPS), quick=1))
def test_random_scripts_of_the_decisions_keep_all_invariants(group, play_all):
    play_all(judge, range(group, SCRIPTS, GROUPS))
