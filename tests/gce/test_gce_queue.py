"""Random scripts of a simulated cloud with a queue against the capacity decisions."""

from __future__ import annotations

from collections import Counter

import pytest

from sailord.capacity.core.model import BootsRetried, CapacityPolicy
from sailord.capacity.core.supply import supply
from tests.conftest import the_first_quick
from tests.gce.cloud_instance import FLEX, POOLS
from tests.gce.queueing_cloud import QueueingRun
from tests.gce.simulated_cloud import RUN_S
from tests.gce.test_gce_scripts import GROUPS, SCRIPTS, keeps_books


def judge(seed: int) -> None:
    """Forty minutes of trouble, and then calm: look at what is left."""
    policy = CapacityPolicy(
        usd_per_hour_max=(None, 30.0)[seed % 2], usd_max=(None, 12.0)[seed % 3 == 2],
        surplus_s=60.0, boot_s=240.0,
    )  # fmt: skip
    run = QueueingRun(seed, policy)
    run.begin()
    run.run(2400.0)
    run.calm, run.wish, run.want = True, 2, Counter({POOLS[0]: 1})
    run.stock, run.limits = dict.fromkeys(run.stock, 50), dict.fromkeys(run.limits, 200)
    if not run.leads:
        run.run(86_400.0)
    run.feed(BootsRetried(run.now))
    run.settle()
    run.run(RUN_S + 5000.0)  # No instance of the trouble is left, and no pool rests.
    if not run.state.stop and run.policy.usd_max is None:
        up = Counter(each.instance.pool for each in run.instances.values() if each.ends_at is None)
        assert up == {POOLS[0]: 1, FLEX: 2} == supply(run.state), (seed, up, run.said[-10:])
    run.works, run.want, run.wish = False, Counter(), 0
    run.run(600.0)
    assert (run.instances, run.queue) == ({}, {}), (seed, "left over")
    assert (run.state.instances, run.state.asks) == ({}, {}), seed
    assert max(run.sent.values(), default=0) <= 1, (seed, "sent twice")
    assert all(run.made[id_] in (0, ask.count) for id_, ask in run.asked.items() if ask.pool.flex)
    keeps_books(run, seed)


@pytest.mark.parametrize("group", the_first_quick(range(GROUPS), quick=1))
def test_random_scripts_of_a_cloud_with_a_queue_keep_all_invariants(group, play_all):
    play_all(judge, range(group, SCRIPTS, GROUPS))
