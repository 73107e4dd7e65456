"""The paper estimator: each term by hand, its errors and its notes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.documents.problems import InputError
from simulator.estimate.paper_formula import FormulaResult, paper_estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.models.layers import Model
from simulator.network.curves import Curve
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage, with_sizes

# A toy of four layers, two GPU kinds and two zones, small enough to reckon on paper.
LAYERS = 4
OUTPUTS = (1_000_000, 2_000_000, 3_000_000, 9_999_999)
PARAMETERS = {1: (40_000_000, 30_000_000, 20_000_000, 10_000_000), 2: (20, 15, 10, 5)}
KEPT = {1: (100, 200, 300, 400), 2: (50, 100, 150, 200)}


def timing(forward_s: float, backward_s: float, step_s: float) -> Timing:
    return Timing(np.full(LAYERS, forward_s), np.full(LAYERS, backward_s), step_s)


PROFILE = Profile(
    name="toy",
    sequence=2048,
    precision="fp32",
    layer_names=("embedding", "block", "block", "head"),
    timings={
        ("fast", 1, 2): timing(0.01, 0.02, 0.001),
        ("fast", 2, 2): timing(0.006, 0.012, 0.0005),
        ("slow", 1, 2): timing(0.03, 0.05, 0.004),
    },
    sizes={tp: LayerSizes(PARAMETERS[tp], OUTPUTS, KEPT[tp]) for tp in (1, 2)},
    optimizer_parameters={},
    config={},
)


def flat(gigabytes_per_s: float, linear: float = 0.0) -> Curve:
    """A fitted curve that is constant, plus ``linear`` GB/s per doubling of the size."""
    return Curve(1, (1.0, 2.0), (1.0, 2.0), polynomial=(0.0, linear, gigabytes_per_s))


FAST, SLOW, AWAY = ("here", "fast"), ("here", "slow"), ("there", "fast")
BANDWIDTHS = {
    (FAST, FAST): {(1, 1): 4.0, (2, 2): 8.0, (1, 2): 5.0, (2, 1): 6.0},
    (FAST, SLOW): {(1, 1): 2.0},
    (SLOW, FAST): {(1, 1): 1.0},
    (SLOW, SLOW): {(1, 1): 3.0},
    (FAST, AWAY): {(1, 1): 0.5},
    (AWAY, FAST): {(1, 1): 0.25},
    (AWAY, AWAY): {(1, 1): 4.0},
}


def toy_network(**changes: Any) -> Network:
    curves = {
        ends: {counts: flat(bandwidth) for counts, bandwidth in table.items()}
        for ends, table in BANDWIDTHS.items()
    }
    egress = {("here", "there"): 0.01e-9, ("there", "here"): 0.03e-9}
    measured = MeasuredNetwork(raw_between=curves, egress_usd_per_byte=egress)
    return Network(load_catalogue(), replace(measured, **changes))


# The formula reads sizes from the profile; the model is only there to make a job.
MODEL = Model(
    name="toy",
    family="gpt",
    layers=(),
    hidden=64,
    heads=4,
    kv_heads=4,
    ffn=256,
    vocab=256,
    sequence_max=2048,
    learned_positions=True,
    tied=True,
)
JOB = Job("toy", MODEL, global_batch=8, sequence=2048, precision="fp32")


def stage(first: int, end: int, gpu: str = "fast", tp: int = 1, zone: str = "here") -> Stage:
    return Stage((first, end), tp, (Place(gpu, f"{gpu}-box", zone),))


def toy_plan(*columns: tuple[Stage, ...], micro_batches: tuple[int, ...] = (2, 2)) -> Plan:
    """Build a plan from stages, each given for all pipelines."""
    rows = zip(*columns, strict=True)
    counts = micro_batches[: len(columns[0])]
    return Plan(2, tuple(Pipeline(m, row) for m, row in zip(counts, rows, strict=True)))


def estimate(plan: Plan, **changes: Any) -> FormulaResult:
    arguments: dict[str, Any] = {
        "job": JOB,
        "profile": PROFILE,
        "network": toy_network(),
        "capacity_bytes": lambda _: 1e10,
        "gpus_per_node": lambda _: 4,
    }
    prices = changes.pop("prices", {"fast": 36.0, "slow": 18.0})

    def usd_per_hour(place: Place, gpus: int, _spot: bool | None) -> float | None:
        return prices[place.gpu] * gpus if place.gpu in prices else None

    arguments["usd_per_hour"] = usd_per_hour
    return paper_estimate(plan, **{**arguments, **changes})


def megabytes_s(megabytes: float, gigabytes_per_s: float) -> float:
    return megabytes * 1e-3 / gigabytes_per_s


# ---------------------------------------------------------------- time


def test_one_pipeline_of_one_stage_computes_only() -> None:
    result = estimate(toy_plan((stage(0, 4),), micro_batches=(5,)))
    assert result.straggler_s == pytest.approx(4 * 4 * 0.03)
    assert result.pipeline_s == pytest.approx(4 * 0.03)
    assert result.update_s == 0.001
    assert result.sync_s == 0.0
    assert result.iteration_s == pytest.approx(5 * 4 * 0.03 + 0.001)


def test_size_that_all_pipelines_state_is_the_plans_size() -> None:
    stated = tuple(replace(pipeline, micro_batch_size=2) for pipeline in TWO.pipelines)
    assert estimate(replace(TWO, micro_batch_size=5, pipelines=stated)) == estimate(TWO)


def test_three_stages_send_once_in_the_middle_and_twice_the_gradient_at_the_end() -> None:
    plan = toy_plan((stage(0, 1),), (stage(1, 3),), (stage(3, 4),), micro_batches=(2,))
    # One micro batch of 2 sequences: 8 MB leave layer 0, 24 MB leave layer 2.
    first = 0.03 + megabytes_s(8, 4)
    middle = 0.06 + megabytes_s(24, 4) + megabytes_s(8, 4)
    last = 0.03 + 2 * megabytes_s(24, 4)
    result = estimate(plan)
    assert result.pipeline_s == pytest.approx(first + middle + last)
    assert result.straggler_s == pytest.approx(middle)


def test_of_more_than_three_stages_the_first_sends_twice() -> None:
    plan = toy_plan(*((stage(layer, layer + 1),) for layer in range(4)), micro_batches=(1,))
    transfers = 2 * 8 + (16 + 8) + (24 + 16) + 2 * 24
    assert estimate(plan).pipeline_s == pytest.approx(4 * 0.03 + megabytes_s(transfers, 4))


def test_stage_is_as_slow_as_its_slowest_replica() -> None:
    plan = toy_plan((stage(0, 4), stage(0, 4, "slow")), micro_batches=(2, 2))
    result = estimate(plan)
    assert result.straggler_s == pytest.approx(4 * 0.08)
    assert result.update_s == 0.004


def test_each_direction_of_a_middle_stage_has_its_own_slowest_replica() -> None:
    plan = toy_plan(
        (stage(0, 1, "fast"), stage(0, 1, "fast")),
        (stage(1, 2, "fast"), stage(1, 2, "slow")),
        (stage(2, 4, "slow"), stage(2, 4, "slow")),
    )
    transfers = (
        megabytes_s(8, 2)  # fast to slow is slower than fast to fast
        + megabytes_s(16, 2)  # the fast replica to its slow successor, not the slow one at 3 GB/s
        + megabytes_s(8, 1)  # the slow replica to its fast predecessor
        + 2 * megabytes_s(16, 1)  # the gradients of the slow last stage to the fast replica
    )
    compute = 0.03 + 0.08 + 2 * 0.08
    assert estimate(plan).pipeline_s == pytest.approx(compute + transfers)


def test_a_transfer_uses_the_curve_of_the_tp_degrees_of_both_sides() -> None:
    plan = toy_plan((stage(0, 2, tp=2),), (stage(2, 4, tp=1),), micro_batches=(1,))
    transfers = megabytes_s(16, 6) + 2 * megabytes_s(16, 5)
    assert estimate(plan).pipeline_s == pytest.approx(2 * 0.018 + 2 * 0.03 + transfers)


def test_a_tp_degree_beyond_the_machine_uses_the_curve_of_the_whole_machine() -> None:
    plan = toy_plan((stage(0, 2, tp=2),), (stage(2, 4, tp=2),), micro_batches=(1,))
    transfers = megabytes_s(16, 4) + 2 * megabytes_s(16, 4)
    result = estimate(plan, gpus_per_node=lambda _: 1)
    assert result.pipeline_s == pytest.approx(4 * 0.018 + transfers)


def test_time_follows_the_pipeline_with_most_micro_batches() -> None:
    columns = ((stage(0, 4), stage(0, 4)),)
    uneven = estimate(toy_plan(*columns, micro_batches=(3, 7)))
    even = estimate(toy_plan(*columns, micro_batches=(7, 7)))
    assert uneven.iteration_s == even.iteration_s
    assert uneven.iteration_s > estimate(toy_plan(*columns, micro_batches=(6, 6))).iteration_s


# ---------------------------------------------------------------- gradient sync


def test_sync_is_a_ring_over_one_gpu_links() -> None:
    replicas = (stage(0, 4), stage(0, 4), stage(0, 4, "slow"))
    plan = toy_plan(replicas, micro_batches=(1, 1, 1))
    # 400 MB in 3 parts, 4 steps; fast to slow at 2 GB/s is the slowest pair, and slow to fast,
    # which closes the ring at 1 GB/s, does not count.
    assert estimate(plan).sync_s == pytest.approx(4 * megabytes_s(400 / 3, 2))


def test_sync_divides_the_gradients_by_the_smallest_tp_of_the_stage() -> None:
    wide = toy_plan((stage(0, 4, tp=2), stage(0, 4, tp=2)))
    mixed = toy_plan((stage(0, 4, tp=2), stage(0, 4, tp=1)))
    assert estimate(wide).sync_s == pytest.approx(2 * megabytes_s(200 / 2, 4))
    assert estimate(mixed).sync_s == pytest.approx(2 * megabytes_s(400 / 2, 4))


def test_sync_counts_the_stage_that_takes_longest() -> None:
    plan = toy_plan((stage(0, 1), stage(0, 1)), (stage(1, 4), stage(1, 4)))
    assert estimate(plan).sync_s == pytest.approx(2 * megabytes_s(240 / 2, 4))


def test_sync_is_split_into_buckets() -> None:
    sizes = dict(PROFILE.sizes)
    sizes[1] = LayerSizes((300_000_000, 0, 0, 0), OUTPUTS, KEPT[1])
    # A fit that is faster for larger messages tells 500 + 500 + 200 MB from 1,200 MB.
    network = toy_network(raw_between={(FAST, FAST): {(1, 1): flat(1.0, linear=0.5)}})
    result = estimate(
        toy_plan((stage(0, 4), stage(0, 4))), profile=replace(PROFILE, sizes=sizes), network=network
    )

    def step_s(megabytes: float) -> float:
        return megabytes_s(megabytes, 1.0 + 0.5 * math.log2(megabytes))

    assert result.sync_s == pytest.approx(2 * (2 * step_s(250) + step_s(100)))


def test_stage_without_parameters_has_no_sync() -> None:
    sizes = dict(PROFILE.sizes)
    sizes[1] = LayerSizes((0, 0, 0, 0), OUTPUTS, KEPT[1])
    plan = toy_plan((stage(0, 4), stage(0, 4)))
    assert estimate(plan, profile=replace(PROFILE, sizes=sizes)).sync_s == 0.0


def test_the_bottleneck_is_the_slowest_stage_or_the_sync_beyond_it() -> None:
    # Layer 2's 24 MB make the sends of the one-layer stages longer than computing three layers.
    tail = toy_plan((stage(0, 3),), (stage(3, 4),), micro_batches=(2,))
    slow = toy_network(raw_between={(FAST, FAST): {(1, 1): flat(0.1)}})
    assert estimate(tail).bottleneck == "stage 0"
    assert estimate(tail, network=slow).bottleneck == "stage 1"
    plan = toy_plan((stage(0, 1), stage(0, 1)), (stage(1, 4), stage(1, 4)), micro_batches=(1, 1))
    assert estimate(plan).bottleneck == "stage 1"
    drop = toy_network(raw_between={(FAST, FAST): {(1, 1): flat(0.01, linear=-0.001)}})
    assert estimate(plan, network=drop).bottleneck == "gradient sync of stage 1"


# ---------------------------------------------------------------- memory


def test_memory_counts_states_activations_in_flight_and_a_constant() -> None:
    plan = toy_plan((stage(0, 3),), (stage(3, 4, tp=2),), micro_batches=(1,))
    result = estimate(plan)
    # Two micro batches are counted in flight although there is but one.
    first = 24 * 90_000_000 + 4 * 2 * 600 * 2
    second = 24 * 5 + 4 * 2 * 200 * 1
    assert result.peak_bytes == ((first + 2e9, second + 3e9),)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_a_device_that_is_exactly_full_fits(spare: int, fits: bool) -> None:
    plan = toy_plan((stage(0, 4),), micro_batches=(1,))
    needed = 24 * 100_000_000 + 4 * 2 * 1000 + 2e9
    assert estimate(plan, capacity_bytes=lambda _: needed + spare).fits == ((fits,),)


# ---------------------------------------------------------------- money


def test_compute_is_paid_by_gpu_for_the_whole_iteration() -> None:
    result = estimate(toy_plan((stage(0, 4, tp=2), stage(0, 4, tp=2)), micro_batches=(3, 2)))
    assert result.money.compute_usd == pytest.approx(4 * 36 / 3600 * result.iteration_s)
    assert result.money.egress_usd == 0.0
    assert result.money.by_pool_usd == (("fast@here", result.money.compute_usd),)


def test_pool_without_a_price_is_named_and_the_total_unknown() -> None:
    plan = toy_plan((stage(0, 4), stage(0, 4, "slow")))
    money = estimate(plan, prices={"fast": 36.0}).money
    assert money.compute_usd is None
    assert money.unpriced == ("slow@here",)


def test_egress_counts_each_pipelines_own_micro_batches_in_both_directions() -> None:
    columns = ((stage(0, 2), stage(0, 2)), (stage(2, 4, zone="there"), stage(2, 4, zone="there")))
    money = estimate(toy_plan(*columns, micro_batches=(3, 5))).money
    each_way = 16e6 * (3 + 5)
    assert dict(money.by_egress_usd) == {
        "here -> there": pytest.approx(each_way * 0.01e-9),
        "there -> here": pytest.approx(each_way * 0.03e-9),
    }
    assert money.egress_usd == pytest.approx(each_way * 0.04e-9)


def test_egress_of_the_gradient_ring_closes_the_ring_and_ignores_tp() -> None:
    there = stage(0, 4, zone="there")
    plan = toy_plan((stage(0, 4), stage(0, 4), there, there), micro_batches=(1, 1, 1, 1))
    # 400 MB, of which each replica sends 2 * 3 / 4 to its neighbour; one pair leaves, one returns.
    expected = 6 / 4 * 400e6 * (0.01e-9 + 0.03e-9)
    assert estimate(plan).money.egress_usd == pytest.approx(expected)


# ---------------------------------------------------------------- what it refuses


def refusal(plan: Plan, **changes: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        estimate(plan, **changes)
    return [str(problem) for problem in caught.value.problems]


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with the last stage of its last pipeline changed."""
    last = plan.pipelines[-1]
    stages = (*last.stages[:-1], replace(last.stages[-1], **changes))
    return replace(plan, pipelines=(*plan.pipelines[:-1], replace(last, stages=stages)))


TWO = toy_plan((stage(0, 2), stage(0, 2)), (stage(2, 4), stage(2, 4)))
PLACE = TWO.pipelines[0].stages[0].place


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(TWO, schedule="gpipe"), "schedule: the paper estimator supports 1f1b, not gpipe"),
        (replace(TWO, zero=0), "zero: the paper estimator does not shard moments"),
        (
            with_sizes(TWO, [2, 1]),
            "micro batch sizes: are 1, 2, and the paper estimator has one micro batch size",
        ),
        (changed(TWO, recompute="full"), "the paper estimator does not support recomputation"),
        (
            changed(TWO, places=(PLACE, PLACE), split=(1, 1)),
            "pipelines[1].stages[1]: the paper estimator does not support split",
        ),
        (
            toy_plan((stage(0, 2), stage(0, 1)), (stage(2, 4), stage(1, 4))),
            "pipelines[1]: its layer boundaries differ from those of pipelines[0]",
        ),
        (
            Plan(2, (Pipeline(1, (stage(0, 4),)), Pipeline(1, (stage(0, 2), stage(2, 4))))),
            "pipelines[1]: its layer boundaries differ",
        ),
        (
            toy_plan((stage(0, 5),), micro_batches=(1,)),
            "pipelines[0]: ends at layer 5, but the profile toy has 4 layers",
        ),
        (
            replace(TWO, micro_batch_size=3),
            "fast at TP 1 and micro batch 3 was not measured (measured at this TP: 2)",
        ),
        (changed(TWO, tp=4), "pipelines[1].stages[1]: fast at TP 4 and micro batch 2 was not mea"),
        (changed(TWO, tp=4), "the profile toy has no sizes for TP 4"),
        (
            toy_plan((stage(0, 4, "slow"), stage(0, 4, zone="there"))),
            "1 x slow in here to 1 x fast in there: the network file has no fitted curve",
        ),
    ],
)
def test_unsupported_plan_is_rejected(plan: Plan, words: str) -> None:
    assert any(words in problem for problem in refusal(plan)), refusal(plan)


def test_profile_needs_sizes_at_tp_1() -> None:
    profile = replace(PROFILE, sizes={2: PROFILE.sizes[2]})
    plan = toy_plan((stage(0, 4, tp=2),), micro_batches=(1,))
    assert refusal(plan, profile=profile) == [
        "profile toy: has no sizes for TP 1, needed for messages"
    ]


def test_missing_egress_price_is_an_error() -> None:
    plan = toy_plan((stage(0, 4), stage(0, 4, zone="there")))
    assert refusal(plan, network=toy_network(egress_usd_per_byte={}))


@pytest.mark.parametrize("gigabytes_per_s", [0.0, -0.1])
def test_fitted_bandwidth_of_zero_or_less_is_an_error(gigabytes_per_s: float) -> None:
    network = toy_network(raw_between={(FAST, FAST): {(1, 1): flat(gigabytes_per_s)}})
    problems = refusal(TWO, network=network)
    assert len(problems) == 3  # One for each size of message, however many pipelines send it.
    assert all("which makes the plan invalid" in problem for problem in problems)


def test_all_mistakes_are_reported_at_once() -> None:
    plan = replace(changed(TWO, recompute="full", layers=(2, 3)), schedule="gpipe")
    assert len(refusal(plan)) == 3


def test_ignored_job_settings_are_noted() -> None:
    job = replace(JOB, precision="bf16", optimizer="sgd", zero=1, sequence=1024)
    assert len(estimate(TWO, job=job).notes) == 4
    assert estimate(TWO).notes == ()


def test_flags_of_a_measurement_reach_the_notes() -> None:
    timings = dict(PROFILE.timings)
    timings["fast", 1, 2] = replace(timings["fast", 1, 2], notes=("looks odd",))
    assert estimate(TWO, profile=replace(PROFILE, timings=timings)).notes == ("looks odd",)


def test_estimate_has_the_same_numbers_as_the_formula() -> None:
    result = estimate(TWO)
    shared = result.estimate(TWO)
    assert shared.estimator == "paper"
    assert shared.iteration_s == result.iteration_s
    assert shared.throughput_samples_per_s == pytest.approx(8 / result.iteration_s)
    assert shared.to_json()["peak_memory_bytes"] == [list(row) for row in result.peak_bytes]


def test_the_formula_knows_no_machines_and_no_placement() -> None:
    plan = toy_plan((stage(0, 2),) * 2, (stage(2, 4),) * 2)
    assert estimate(replace(plan, together=1)) == estimate(plan)


# ---------------------------------------------------------------- outer steps


def test_groups_with_outer_steps_iterate_by_themselves() -> None:
    column = (stage(0, 4), stage(0, 4), stage(0, 4, zone="there"))
    plan = toy_plan(column, micro_batches=(2, 3, 9))
    plain, outer = estimate(plan), estimate(replace(plan, outer_every=10))
    here = estimate(toy_plan(column[:2], micro_batches=(2, 3)))
    there = estimate(toy_plan(column[2:], micro_batches=(9,)))
    assert (here.sync_s > 0, there.sync_s) == (True, 0)
    assert there.iteration_s > here.iteration_s
    share = (plain.sync_s + plain.update_s) / 10
    assert outer.outer_s == pytest.approx(share)
    assert outer.iteration_s == pytest.approx(there.iteration_s + share)
    assert outer.money.egress_usd == pytest.approx(plain.money.egress_usd / 10)
    held = sum(PARAMETERS[1])
    for found, without in zip(outer.memory, plain.memory, strict=True):
        assert found[0].optimizer == without[0].optimizer + 8 * held
    assert "the loss is not that of data parallelism" in outer.notes[0]
