"""The instances that a running sailord requests for a deadline are those that a replay uses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from planner.replay.run_replay import replayed
from sailord.capacity.core import model
from sailord.capacity.loop import CapacityLoop
from sailord.cli.planning.replay import machines_taken
from sailord.core.model.nodes import Nodes
from sailord.planning.capacity_search import choose_capacity
from sailord.planning.job_spec import read_job
from sailord.planning.messages import MoveContext
from sailord.providers.interface import Pool
from simulator.api import Measurements
from simulator.cluster.cluster import Pool as ClusterPool
from simulator.cluster.cluster_file import load_cluster
from simulator.traces.play_types import ReconfigurationCosts
from simulator.traces.trace import trace_of
from tests.gce.virtual_client import Gateway
from tests.sailord.capacity.core.story import Story
from tests.sailord.core.states import NOW, job, state

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS = 1000
SPEC = (
    (EXAMPLES / "opt-350m.toml")
    .read_text(encoding="utf-8")
    .replace("[training]", f"[training]\nsteps = {STEPS}")
    .replace('goal = "throughput"', 'goal = "cost"')
)
"""On four instances a step takes 5 s, on two 9 s for less money, and on one GPU 64 s for still
less."""
FIRM = Pool("us-central1-b", "A100-40x4", "A100-40", 4, spot=False)
SPOT = replace(FIRM, spot=True)
USD = {FIRM: 12.0, SPOT: 4.0}


class Requests(Story):
    """What sailord requests for a job that was submitted just now."""

    def __init__(self, deadline_s: float, prices=USD, spec=SPEC) -> None:
        super().__init__(model.CapacityPolicy(machines_per_pool_max=4), at=NOW)
        self.hear(model.PricesRead(NOW, prices)).see(NOW)
        record = job(submitted_at=NOW, steps=STEPS, deadline=NOW + deadline_s)
        now = replace(state(job=record, step=0), nodes=Nodes({}))
        asyncio.run(self._want(now, spec))

    async def _want(self, now, spec) -> None:
        async def read_spec(_job):
            return spec

        async def ask_capacity(request, **_options):
            return choose_capacity(request)

        gateway = Gateway(lambda: False, None)
        gateway.read_spec = read_spec
        loop = CapacityLoop(
            SimpleNamespace(
                cluster_file=EXAMPLES / "three-zones.toml", profiles=None, measured_links=None
            ),
            SimpleNamespace(pools=(FIRM, SPOT)),
            self.state.policy,
            SimpleNamespace(state=now, move_context=MoveContext()),
            SimpleNamespace(ask_capacity=ask_capacity),
            gateway,
            SimpleNamespace(now=lambda: NOW),
        )
        loop.state = self.state
        await loop._want()
        self.hear(model.ProgressSeen(NOW, loop._progress())).hear(loop._events.get_nowait())


def used_in_replay(deadline_s: float) -> int:
    """The spot instances that a replay uses first."""
    given = [
        ClusterPool(pool.zone, pool.gpu, pool.machine, 4, 16, spot=pool.spot,
                    price_usd_per_gpu_hour=usd / 4)
        for pool, usd in USD.items()
    ]  # fmt: skip
    cluster = replace(load_cluster(EXAMPLES / "three-zones.toml"), pools=tuple(given), quotas=())
    trace = trace_of("calm", iter([(0.0, (16, 16))]), deadline_s)
    found = replayed(
        Question(read_job(SPEC), cluster, Measurements(), proves=False, is_bounded=False),
        trace, ReconfigurationCosts(5, 10, 100, 300), taken=machines_taken(trace, cluster, 0),
        search=plan_job, searches=9, deadline_s=deadline_s,
    )  # fmt: skip
    ours = next(each for each in found.policy_results if each.policy == "sailor")
    firm, spot = found.figures[ours.segments[0].plan].gpus
    assert firm == 0
    return spot // 4


@pytest.mark.slow
@pytest.mark.parametrize(("deadline_s", "count"), [(9000.0, 4), (100_000.0, 2)])
def test_the_spot_instances_that_save_most_until_the_deadline_are_requested(deadline_s, count):
    assert Requests(deadline_s).state.target == {FIRM: 0, SPOT: count}
    assert used_in_replay(deadline_s) == count


@pytest.mark.slow
@pytest.mark.parametrize(("goal", "usd"), [("cost", 12.0), ("throughput", 15.0)])
def test_spot_instances_that_cost_as_much_by_the_step_as_on_demand_are_not_requested(goal, usd):
    """A step on four on-demand instances costs as much as on one for $14.8."""
    spec = SPEC.replace('goal = "cost"', f'goal = "{goal}"')
    dear = Requests(100_000.0, {**USD, SPOT: usd}, spec)
    assert dear.asks() == []
    assert "waits for cheaper spot instances" in dear.state.pace.why
    (asked,) = Requests(100_000.0, {**USD, SPOT: usd - 2.0}, spec).asks()
    assert asked[0] == SPOT
