"""Random scripts of a simulated cloud against the capacity decisions alone.

``test_gce_random`` has the provider and the fake Google Cloud between them.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from sailord.capacity.core.budget import spent_usd
from sailord.capacity.core.decide import supply
from sailord.capacity.core.model import Policy
from tests.conftest import the_first_quick
from tests.gce.simulated_cloud import POOLS, Run

SCRIPTS = int(os.environ.get("SAILOR_SCRIPTS", "200"))
"""Fewer than ``test_gce_random`` plays, whose scripts have all of this in them and a cloud."""
GROUPS = 10


def play(seed: int) -> Run:
    """Forty minutes of trouble, and then calm."""
    usd_max = (None, 4.0, 12.0)[seed % 3]
    per_hour = (None, 20.0)[seed % 2]
    policy = Policy(usd_per_hour_max=per_hour, usd_max=usd_max, surplus_s=60.0, boot_s=240.0)
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
    run.run(1500.0)
    if not run.state.stop and run.policy.usd_max is None:
        up = Counter(m.instance.pool for m in run.machines.values() if m.ends_at is None)
        cooldowns = {p: r for p, r in run.state.cooldowns.items() if r.until > run.now}
        missing = {p for p, count in run.want.items() if up[p] < count}
        assert missing <= cooldowns.keys(), (seed, up, run.said[-10:])
        assert all(up[p] <= run.want[p] for p in up), (seed, up, run.want)
        assert supply(run.state) == +up, seed
    run.works, run.want = False, Counter()
    run.run(600.0)
    assert run.machines == {}, (seed, "left over")
    assert run.state.machines == {}, seed
    assert run.state.asks == {}, seed
    assert max(run.sent.values(), default=0) <= 1, (seed, "sent twice")
    assert all(run.made[id_] <= ask.count for id_, ask in run.asked.items()), seed
    assert run.overspent <= 0, (seed, run.overspent, run.policy)
    assert run.too_dear_s <= run.policy.look_s, seed
    assert spent_usd(run.state) == pytest.approx(run.bill(), abs=1e-6), seed


@pytest.mark.parametrize("group", the_first_quick(range(GROUPS), quick=2))
def test_random_scripts_of_the_decisions_keep_all_invariants(group, play_all):
    play_all(judge, range(group, SCRIPTS, GROUPS))
