"""The least prices of pipelines by their round trips, against random plans in random worlds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.api import plan_job
from planner.problem.inventory import lots_of
from planner.problem.question import Question
from planner.search import bound, sync_bound
from planner.search.pricing import share_out
from planner.search.round_trips import RoundTrips, chains, levels_of
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate import gradient_sync, optimizer_step, sync_rings
from simulator.estimate.machine_layout import lay_out
from simulator.estimate.schedule_replay import Edge, GroupTimes, replay
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import Messaging
from simulator.models.layers import Precision
from simulator.models.presets import preset
from simulator.network import network
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Schedule
from tests.planner.search.test_zero_bubble import put_shares
from tests.planner.search.tight_plans import (
    any_recomputation,
    just_enough,
    just_fitting,
    placed_somehow,
    tables_of,
)
from tests.simulator.worlds import World, random_plan, random_world


def cases_of(plan: Plan, trips: RoundTrips, world: World) -> list[list[tuple[int, bool]]]:
    """By pipeline and stage: the stage's case, and whether it is the first of its machine's."""
    layout = lay_out(plan, world.estimator.facts.machines)
    groups, node = layout.groups, layout.node.tolist()
    first, end = groups.first.tolist(), groups.end.tolist()

    def is_inside(row: int) -> bool:
        """Whether the ring of one of the stage's layers runs inside its machine."""
        return any(
            len({node[n] for n in range(len(node)) if first[n] <= layer < end[n]}) == 1
            for layer in range(first[row], end[row])
        )

    found = []
    for begin, stop in groups.blocks:
        cases: list[tuple[int, bool]] = []
        for _, run in itertools.groupby(range(begin, stop), key=node.__getitem__):
            rows = list(run)
            case = 0
            if len(trips.cases) > 1 and not any(map(is_inside, rows)):
                case = max(n for n, one in enumerate(trips.cases) if n and one.fewest <= len(rows))
            cases += [(case, row == rows[0]) for row in rows]
        found.append(cases)
    return found


def least_seconds(
    trips: RoundTrips, choices: list[int], pipeline: Pipeline, cases: list[tuple[int, bool]]
) -> float:
    """The least time in which each stage of a pipeline meets the conditions of ``round_trips``."""
    n, least, behind_s, passes_behind_s = pipeline.micro_batches, 0.0, 0.0, 0.0
    for k, s in enumerate(reversed(range(len(choices)))):
        choice, (case, is_alone) = choices[s], cases[s]
        f, e = pipeline.stages[s].layers
        table, times = trips.cases[case], trips.times
        rests = table.rest_alone if is_alone else table.rest
        rest = rests[min(k, len(rests) - 1), choice, f, e]
        forward, backward = times.forward[choice, f, e], times.backward[choice, f, e]
        if trips.again.is_chosen:
            again = trips.again_s[min(n, k + 1, len(trips.again_s)) - 1, choice, f, e]
        else:
            again = 0.0
        backward += again
        inputs = times.inputs[choice, f, e] + again
        own, once, hop_s = forward + backward, forward + inputs, 0.0
        if k:
            behind = trips.kinds.index(pipeline.stages[s + 1].place.gpu)
            is_near = not cases[s + 1][1]
            hop_s = times.transfer[choice, e] if is_near else trips.leave[choice, behind, e]
            behind_s += 2 * hop_s
        busy_s = n * own
        # From the first forward to the end of the last backward's first part.
        chains = [n * once]
        if k:
            later = max(n - k - 1, 0)
            busy_s = max(busy_s, forward + behind_s + n * backward + later * forward)
            trip_s = once + behind_s
            chains = [
                once + 2 * hop_s + passes_behind_s,
                trip_s + (n - 1) * inputs + later * forward,
                trip_s + (n - 1) * hop_s,
            ]
            # After its last round trip but one, the stage runs a forward for each backward.
            for rounds in range(2, -(-n // (k + 1)) + 1):
                between = n - 1 - (rounds - 1) * (k + 1)
                chains.append(rounds * trip_s + between * once)
        least = max(least, rest + busy_s, rest + max(chains) + backward - inputs)
        behind_s, passes_behind_s = behind_s + once, max(chains)
        if s == 0:
            least = max(least, passes_behind_s + table.end[choice, e])
    return least


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("is_gloo", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_no_pipeline_is_quicker_or_cheaper_than_its_bound(
    examples: int, schedule: Schedule, is_gloo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gloo:
        for module in (gradient_sync, optimizer_step, network, sync_bound, sync_rings):
            monkeypatch.setattr(module, "uses_gloo", lambda _: True)
    for seed in range(examples):
        rng = random.Random(f"round trips {seed}")
        if schedule == "zero-bubble":
            put_shares(monkeypatch, seed)
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=(schedule,), splits=False)
        if rng.random() < 0.5:
            # Equal pipelines come closest to the bound.
            plan = replace(plan, pipelines=(plan.pipelines[0],) * len(plan.pipelines))
        plan, policy = any_recomputation(rng, plan)
        lots = lots_of(just_enough(plan, world), world.estimator.facts)
        plan = placed_somehow(plan, rng)
        judge = world.estimator
        estimate = judge.estimate(plan)
        if not estimate.fits:
            continue
        tables = tables_of(judge, lots, policy, divides=schedule == "zero-bubble")
        price = {gpu: rng.uniform(0.3, 3) for gpu in sorted({lot.gpu for lot in lots})}
        prices = np.array([price[choice.gpu] * choice.tp for choice in tables.choices])
        number = len(plan.pipelines)
        fewest = rng.randint(max(1, number - 1), number)
        upto = number + rng.randint(0, 1)
        with just_fitting(rng, world, plan):
            trips, rough = (
                RoundTrips.of(tables, plan.micro_batch_size, fewest, upto, is_rough=is_rough)
                for is_rough in (False, True)
            )
        for pipeline, cases in zip(plan.pipelines, cases_of(plan, trips, world), strict=True):
            choices = [tables.index_of(stage.place.gpu, stage.tp) for stage in pipeline.stages]
            least_s = least_seconds(trips, choices, pipeline, cases)
            assert least_s <= estimate.iteration_s * (1 + 1e-9), seed
            # So does what is known of each stage without the others.
            most = tables.most(
                plan.micro_batch_size, estimate.iteration_s * (1 + 1e-9), fewest, number + 1
            )
            for s, choice in enumerate(choices):
                behind = min(len(choices) - 1 - s, len(most) - 1)
                ran = most[behind, choice, *pipeline.stages[s].layers]
                assert ran >= pipeline.micro_batches, (seed, s)
            paid = float(prices[choices].sum())
            counts = np.array([pipeline.micro_batches])
            # In that time the pipeline itself is among those that are found.
            for each in (trips, rough):
                found, _ = each.prices(
                    least_s * (1 + 1e-9), counts, prices, highest=2 * paid, stages_max=99
                )
                assert found[0] <= paid * (1 + 1e-9), seed


def any_times(rng: random.Random, stages: int, *, divides: bool) -> list[GroupTimes]:
    """Times of equal or different stages, whose messages block a device for any time."""
    spread, blocked = rng.choice([0.0, 0.3, 1.5]), rng.choice([0.0, 0.1, 1.0])

    def any_s(scale: float) -> float:
        return scale * 10 ** rng.uniform(-spread, spread)

    found = []
    for s in range(stages):
        before, behind = (blocked * is_there for is_there in (s > 0, s < stages - 1))
        backward = any_s(2.0)
        found.append(
            GroupTimes(
                s, any_s(1.0), backward, any_s(before), any_s(behind), any_s(behind), any_s(before),
                backward * rng.choice([0.0, 0.5, 1.0]) * divides,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("schedule", "messaging"),
    [
        *itertools.product(("1f1b", "zero-bubble"), ("eager", "blocking")),
        ("1f1b", "lockstep"),
    ],
)
def test_no_chain_of_events_is_longer_than_the_passes_of_a_schedule(
    schedule: Schedule, messaging: Messaging, examples: int
) -> None:
    is_tight = False
    for seed in range(10 * examples):
        rng = random.Random(f"chains {schedule} {messaging} {seed}")
        stages, n = rng.randint(1, 7), rng.choice([rng.randint(1, 8), rng.randint(1, 40)])
        times = any_times(rng, stages, divides=schedule == "zero-bubble")
        hop = rng.choice([0.0, 0.1, 1.0, 8.0])
        edges = [
            Edge(s, s + 1, hop * rng.uniform(1, 2), hop * rng.uniform(1, 2))
            for s in range(stages - 1)
        ]
        found = replay(times, edges, schedule=schedule, micro_batches=n, messaging=messaging)
        span = {(one.group, one.kind, one.micro_batch): one for one in found.spans}
        count, trip, whole = np.array([n]), np.zeros(1), np.zeros(1)
        for k, s in enumerate(reversed(range(stages))):
            one = times[s]
            forward = one.receive_activation + one.forward + one.send_activation
            inputs = one.receive_gradient + one.backward - one.weight + one.send_gradient
            way = min(edges[s].activation, edges[s].gradient) if k else 0.0
            trip = trip + forward + inputs + 2 * way
            whole = whole + forward + inputs + 2 * way if k else n * trip
            each = (np.array(value) for value in (forward, inputs, way))
            for rounds, seconds in chains(count, k, *each) if k else ():
                whole = np.maximum(whole, rounds * trip + seconds)
            begin = span[s, "F", 0].start - one.receive_activation
            end = span[s, "B", n - 1].end + one.send_gradient
            assert whole[0] <= (end - begin) * (1 + 1e-9), (seed, s)
            is_tight |= bool(k and whole[0] > (end - begin) * (1 - 1e-9))
    assert is_tight, "some chain is as long as the passes"


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "batch"),
    [("gpt2-xl", "A100-40", "bf16", 64), ("opt-1.3b", "V100-16", "fp16", 512)],
)
def test_a_machine_of_eight_leaves_a_small_gap(
    model: str, gpu: str, precision: Precision, batch: int
) -> None:
    """The time of the layers before a stage counts; at their best it left 13.5 and 4.0 %."""
    pool = Pool("us-central1-a", gpu, f"{gpu}x8", 8, 8)
    job = Job(
        "one", preset(model), batch, 1024, precision=precision, optimizer="adam", max_tp=8,
        recompute="auto",
    )  # fmt: skip
    answer = plan_job(
        Question(job, Cluster((pool,), load_catalogue()), Measurements(), prefer="fastest")
    )
    assert answer.gap is not None
    assert answer.gap < 0.02


def test_micro_batches_are_shared_out_at_the_least_price() -> None:
    rng = random.Random("shares")
    for _ in range(20):
        total, pipelines = rng.randint(4, 9), rng.randint(1, 4)
        counts = np.array([1, 2, 4, 7])
        price = np.sort([rng.uniform(1, 9) for _ in counts])

        def of(n: int, counts: np.ndarray = counts, price: np.ndarray = price) -> float:
            return float(price[np.searchsorted(counts, n, side="right") - 1])

        ways = itertools.product(range(1, total + 1), repeat=pipelines)
        best = min(sum(map(of, way)) for way in ways if sum(way) == total)
        least, shares = share_out(counts, price, pipelines, total)
        assert least == pytest.approx(best)
        assert set(shares) <= set(range(len(counts)))


def test_many_micro_batches_are_not_shared_out_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large prime batch has micro batches of one sample: pairs of them took hours."""
    totals: list[int] = []

    def counted(counts: np.ndarray, price: np.ndarray, pipelines: int, total: int) -> object:
        totals.append(total)
        return share_out(counts, price, pipelines, total)

    monkeypatch.setattr(bound, "share_out", counted)
    pool = Pool("us-central1-a", "A100-40", "A100-40x8", 8, 8)
    for batch, most in ((1009, 1009), (30_011, 0)):
        totals.clear()
        job = Job("prime", preset("opt-125m"), batch, 512, micro_batches=(1,))
        answer = plan_job(
            Question(job, Cluster((pool,), load_catalogue()), Measurements(), budget=9)
        )
        assert answer.objective is not None
        assert 0 < answer.lower_bound <= answer.objective
        assert max(totals, default=0) == most


def test_levels_are_the_sums_of_prices() -> None:
    assert levels_of(np.array([1.0, 1.5]), 3.1).tolist() == [0, 1, 1.5, 2, 2.5, 3]
    assert len(levels_of(np.array([0.01, 0.013, 7.0]), 9.0)) <= 96
