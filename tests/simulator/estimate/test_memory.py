"""Memory part by part, on cases that can be computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from simulator.estimate.memory import RESERVED_OVER_LIVE
from simulator.estimate.result import DeviceMemory
from simulator.hardware.runtime_constants import PLATFORMS, RUNTIMES, platform_of
from simulator.layer_costs.profile import LayerSizes
from simulator.models.layers import Layer, Model, PassPoint, Recompute, TensorSpec, Term
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Schedule, Stage
from tests.simulator.worlds import (
    World,
    cases,
    even_profile,
    place,
    random_plan,
    random_world,
    small_model,
    stage,
    world_of,
)

TOKENS, WIDTH = 10, 4
"""A sample has ten tokens of four elements each: forty elements cross each boundary."""


def layer(
    name: str, *, parameters: int, kept: int, checkpoint: int, transient: int, kind: str = "block"
) -> Layer:
    """A layer with round numbers of elements per token: kept, recomputed and transient."""
    return Layer(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # a test's shorthand
        tensors=(TensorSpec("weight", (parameters,), split_dim=0, ways=8),),
        flops=(Term("product", per_token=1000),),
        kept=(Term("kept", per_token=kept),),
        checkpoint=(Term("input", per_token=checkpoint),) if checkpoint else (),
        moments=(PassPoint("backward", (Term("transient", per_token=transient),)),),
        traffic=(Term("all", per_token=kept),),
        output_per_token=WIDTH,
        allreduces_forward=0,
        allreduces_backward=0,
        allreduce_per_token=WIDTH,
    )


def model() -> Model:
    """Embedding, three blocks and a head, whose numbers all differ."""
    return Model(
        name="round",
        family="described",
        layers=(
            layer("in", parameters=800, kept=3, checkpoint=0, transient=5, kind="embedding"),
            *(
                layer(f"block {i}", parameters=1600, kept=20, checkpoint=4, transient=30)
                for i in (1, 2, 3)
            ),
            layer("out", parameters=400, kept=7, checkpoint=0, transient=50, kind="head"),
        ),
        hidden=WIDTH,
        heads=8,
        kv_heads=8,
        ffn=16,
        vocab=100,
        sequence_max=TOKENS,
        learned_positions=False,
        tied=False,
    )


def world(**changes: object) -> World:
    fixed = {
        "name": "fixed",
        "model": model(),
        "global_batch": 8,
        "sequence": TOKENS,
        "precision": "fp16",
        "optimizer": "adam",
    }
    return world_of(Job(**{**fixed, **changes}))  # type: ignore[arg-type]  # a test's shorthand


def two_stages(
    *, micro_batches: int = 6, replicas: int = 1, recompute: Recompute = "none", tp: int = 1
) -> Plan:
    stages = (
        stage(0, 2, place(), tp=tp, recompute=recompute),
        stage(2, 5, place(), tp=tp, recompute=recompute),
    )
    return Plan(2, (Pipeline(micro_batches, stages),) * replicas)


def devices(world: World, plan: Plan) -> tuple[DeviceMemory, ...]:
    return world.estimator.estimate(plan).memory[0]


SAMPLES = 2
BUCKETS = 2 * RUNTIMES["sailor"].sync_bucket_bytes
PLATFORM = platform_of("V100-16")


def test_every_memory_part_by_hand() -> None:
    """Two stages in fp16: weights of 2 bytes, gradients of 4, two moments and a copy of 4 each."""
    here = world()
    first, last = devices(here, two_stages(replicas=2))
    assert first.parameters == 2 * (800 + 1600)
    assert first.gradients == 4 * (800 + 1600)
    assert first.optimizer == (2 * 4 + 4) * (800 + 1600)
    assert last.parameters == 2 * (1600 + 1600 + 400)
    # Two micro batches in flight on the first stage, one on the last; 2 bytes an element.
    assert first.activations == 2 * 2 * SAMPLES * TOKENS * (3 + 20)
    assert last.activations == 1 * 2 * SAMPLES * TOKENS * (20 + 20 + 7)
    assert first.workspace == RESERVED_OVER_LIVE * 2 * SAMPLES * TOKENS * 30
    # The head's transients have their own reserve beside the block's.
    assert last.workspace == RESERVED_OVER_LIVE * 2 * SAMPLES * TOKENS * (30 + 50)
    boundary = 2 * SAMPLES * TOKENS * WIDTH
    assert first.communication == boundary + BUCKETS
    assert last.communication == boundary + BUCKETS
    assert first.context == PLATFORM.context_bytes
    assert first.fragmentation == PLATFORM.fragmentation * first.activations
    assert first.capacity == here.cluster.catalogue.gpu("V100-16").usable_memory_bytes
    assert first.total == pytest.approx(
        first.parameters
        + first.gradients
        + first.optimizer
        + first.activations
        + first.workspace
        + first.communication
        + first.context
        + first.fragmentation
    )
    assert first.fits


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "moments"),
    [
        ("fp32", "adam", 4, 8),
        ("fp32", "sgd", 4, 4),
        ("fp16", "adamw", 2, 12),
        ("fp16", "sgd", 2, 8),
    ],
)
def test_state_by_precision_and_optimizer(
    precision: str, optimizer: str, weights: int, moments: int
) -> None:
    first, _ = devices(world(precision=precision, optimizer=optimizer), two_stages())
    assert first.parameters == weights * 2400
    assert first.gradients == 4 * 2400
    assert first.optimizer == moments * 2400
    width = 4 if precision == "fp32" else 2
    assert first.activations == 2 * width * SAMPLES * TOKENS * 23


def test_frozen_parameters_take_their_weights_alone() -> None:
    whole = model()
    block = whole.layers[1]
    frozen = replace(
        block, tensors=(TensorSpec("extra", (100,), 0, 4, frozen=True), *block.tensors)
    )
    changed = replace(whole, layers=(whole.layers[0], frozen, *whole.layers[2:]))
    for tp, held in ((1, 100), (2, 50)):
        before, _ = devices(world(), two_stages(tp=tp))
        after, last = devices(world(model=changed), two_stages(tp=tp))
        assert after.parameters == before.parameters + 2 * held
        assert (after.gradients, after.optimizer) == (before.gradients, before.optimizer)
        assert last.parameters == devices(world(), two_stages(tp=tp))[1].parameters


def test_tp_divides_split_tensors() -> None:
    one, four = (devices(world(max_tp=4), two_stages(tp=tp))[0] for tp in (1, 4))
    assert four.parameters == one.parameters / 4
    assert four.optimizer == one.optimizer / 4
    # This model's activations are whole on every rank.
    assert four.activations == one.activations


def test_single_pipeline_needs_no_gradient_buffers() -> None:
    alone, _ = devices(world(), two_stages())
    assert alone.communication == 2 * SAMPLES * TOKENS * WIDTH


def test_recomputation_keeps_the_inputs_of_blocks() -> None:
    """Embedding and head are not recomputed; a block's activations are recomputed once."""
    first, last = devices(world(), two_stages(recompute="full"))
    assert first.activations == 2 * 2 * SAMPLES * TOKENS * (3 + 4)
    assert last.activations == 2 * SAMPLES * TOKENS * (4 + 4 + 7)
    assert first.workspace == RESERVED_OVER_LIVE * 2 * SAMPLES * TOKENS * (30 + 20 - 4)


def test_a_share_of_the_layers_keeps_its_inputs_only() -> None:
    """Of a stage's layers the first ones are recomputed; an embedding has nothing to recompute."""
    plan = two_stages()
    first, last = plan.pipelines[0].stages
    parts = []
    for number in (1, 2):
        stages = (first, replace(last, recompute=number))
        parts.append(devices(world(), Plan(2, (Pipeline(6, stages),)))[1])
    each = 2 * SAMPLES * TOKENS
    assert [one.activations for one in parts] == [each * (4 + 20 + 7), each * (4 + 4 + 7)]
    restored = RESERVED_OVER_LIVE * each * (30 + 20 - 4 + 50)
    assert [one.workspace for one in parts] == [restored, restored]
    kept, _ = devices(world(), plan)
    in_vain = replace(first, recompute=1)
    assert devices(world(), Plan(2, (Pipeline(6, (in_vain, last)),)))[0] == kept


def test_recomputing_more_layers_is_slower_and_keeps_less(examples: int) -> None:
    """From no layer to all, one by one; the ends are the plans without a share."""
    for seed in cases("shares", examples // 5):
        rng = random.Random(seed)
        here = random_world(rng)
        plan = random_plan(rng, here, splits=False)
        number = rng.randrange(len(plan.pipelines[0].stages))
        one = plan.pipelines[0].stages[number]
        ways: list[Recompute | int] = ["none", *range(1, one.layers[1] - one.layers[0]), "full"]
        found = []
        for way in ways:
            stages = list(plan.pipelines[0].stages)
            stages[number] = replace(one, recompute=way)
            first = replace(plan.pipelines[0], stages=tuple(stages))
            changed = replace(plan, pipelines=(first, *plan.pipelines[1:]))
            estimate = here.estimator.estimate(changed)
            device = estimate.memory[0][number % plan.group_count(first)]
            found.append((estimate.iteration_s, -device.activations))
        for before, after in pairwise(found):
            assert after[0] >= before[0] * (1 - 1e-12), seed
            assert after[1] >= before[1] * (1 + 1e-12), seed


def test_profiled_head_memory_is_kept_under_recomputation() -> None:
    """The profiled head keeps less than the model's, and it is not recomputed."""
    job = world(precision="fp32").job
    profile = replace(
        even_profile(job, {"V100-16": 0.01}, micro_batches=(2,)),
        sizes={1: LayerSizes((800, 1600, 1600, 1600, 400), (40,) * 5, (30, 150, 150, 150, 1))},
    )
    here = world_of(job, profile=profile)
    for recompute, block in (("none", 150), ("full", 4 * TOKENS)):
        _, last = devices(here, two_stages(recompute=recompute))  # type: ignore[arg-type]  # words the test chose
        assert last.activations == 4 * SAMPLES * (2 * block + 1)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "held"),
    [("1f1b", 1, 1), ("1f1b", 2, 2), ("1f1b", 9, 2), ("gpipe", 1, 1), ("gpipe", 9, 9)],
)
def test_activations_by_schedule(schedule: Schedule, micro_batches: int, held: int) -> None:
    plan = replace(two_stages(micro_batches=micro_batches), schedule=schedule)
    first, _ = devices(world(), plan)
    assert first.activations == held * 2 * SAMPLES * TOKENS * 23


def test_chunks_of_one_device_group_add_up() -> None:
    """Two groups of two chunks: the first holds layer 0 and layers 2-3.

    Megatron's order warms the first of two groups up with (2 - 0 - 1) * 2 + 2 = 4 forwards:
    micro batches 0 and 1 through the first chunk, then both through the second. Then forwards
    of micro batches 2 and 3 through the first alternate with backwards of 0 and 1 through the
    second: three and two are held at once, and then four and one.
    """
    cuts = ((0, 1), (1, 2), (2, 4), (4, 5))
    plan = Plan(2, (Pipeline(4, tuple(stage(*cut, place()) for cut in cuts)),), "interleaved", 2)
    first, second = devices(world(), plan)
    assert first.parameters == 2 * (800 + 1600 + 1600)
    assert second.parameters == 2 * (1600 + 400)
    each = 2 * SAMPLES * TOKENS
    assert first.activations == each * max(3 * 3 + 2 * 40, 4 * 3 + 1 * 40)
    # The second group does no forward but the first two before it gives one back.
    assert second.activations == each * max(2 * 20 + 1 * 7, 1 * 20 + 2 * 7, 3 * 20)


def test_gloo_sums_gradients_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gloo = replace(platform_of("V100-16"), transport="gloo")
    monkeypatch.setitem(PLATFORMS, "V100-16", on_gloo)  # type: ignore[arg-type]  # it is a dict
    assert devices(world(), two_stages(replicas=2)) == devices(world(), two_stages(replicas=1))


# ZeRO-1 ----------------------------------------------------------------------------------------


SHARES = "megatron-deepspeed"
"""The runtime whose holders have equal shares; of ours, parts of layers have one owner each."""


def test_a_part_that_finer_replicas_make_a_rank_copy_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = world()
    coarse, fine = two_stages(), two_stages(tp=4)
    alone = [each.communication for each in devices(here, coarse)]
    alike = [each.communication for each in devices(here, two_stages(replicas=2))]
    assert alike == [each + BUCKETS for each in alone]
    small = replace(RUNTIMES["sailor"], sync_bucket_bytes=100.0)
    monkeypatch.setitem(RUNTIMES, "sailor", small)  # type: ignore[arg-type]  # it is a dict
    here = world()
    mixed = replace(coarse, pipelines=(*coarse.pipelines, *fine.pipelines))
    rows = here.estimator.estimate(mixed).memory
    # Four ranks hold a block of 1,600 parameters, so a rank that has it alone sums it in four
    # parts, two of which are copied at once; those of the finer pipeline need no copies.
    assert [each.communication - base for each, base in zip(rows[0], alone, strict=True)] == [
        2 * 4 * 400,
        2 * 4 * 400,
    ]
    assert [each.communication - base for each, base in zip(rows[1], alone, strict=True)] == [
        2 * 100,
        2 * 100,
    ]


def test_zero1_divides_optimizer_state_by_the_replicas() -> None:
    whole, sharded = (
        devices(world(zero=zero, runtime=SHARES), two_stages(replicas=3))[0] for zero in (0, 1)
    )
    assert sharded.optimizer == pytest.approx(whole.optimizer / 3)
    assert replace(sharded, optimizer=whole.optimizer) == whole


def test_owners_keep_the_moments_of_whole_layers_and_all_holders_fp32_copies() -> None:
    """Layers of 800 and 1600; then 1600, 1600 and 400: largest first, to the rank with least."""
    for replicas, most in ((2, (1600, 2000)), (3, (1600, 1600)), (9, (1600, 1600))):
        first, last = devices(world(zero=1), two_stages(replicas=replicas))
        assert first.optimizer == 4 * 2400 + 8 * most[0]
        assert last.optimizer == 4 * 3600 + 8 * most[1]
    (alone, _) = devices(world(zero=1), two_stages())
    assert alone.optimizer == 12 * 2400


def test_zero1_divides_each_layer_by_its_holders() -> None:
    """Only the first stage is split: the other's optimizer state has a single owner.

    Once every layer counted as held by as many groups as the first stage has.
    """
    plan = Plan(2, (Pipeline(4, (stage(0, 2, place(), place()), stage(2, 5, place()))),))
    first, last = devices(world(zero=1, runtime=SHARES), plan)
    assert first.optimizer == 12 * 2400 / 2
    assert last.optimizer == 12 * 3600
    # And the split stage sums gradients, so that it needs buffers for them, unlike the other.
    first, last = devices(world(zero=1), plan)
    assert first.communication == 2 * (SAMPLES / 2) * TOKENS * WIDTH + BUCKETS
    assert last.communication == 2 * SAMPLES * TOKENS * WIDTH


def test_zero1_with_different_layer_boundaries() -> None:
    """Each layer has three holders, and they hold it with different other layers."""

    def pipeline(cut: int) -> Pipeline:
        return Pipeline(4, (stage(0, cut, place()), stage(cut, 5, place())))

    plan = Plan(2, (pipeline(1), pipeline(3), pipeline(3)))
    memory = world(zero=1, runtime=SHARES).estimator.estimate(plan).memory
    assert memory[0][0].optimizer == pytest.approx(12 * 800 / 3)
    assert memory[1][1].optimizer == pytest.approx(12 * 2000 / 3)


def test_zero1_for_a_stage_whose_layers_have_different_holders() -> None:
    """Layers 0-1 are held by three groups, the others by two; one stage holds them all."""
    parted = Pipeline(2, (stage(0, 2, place(), place()), stage(2, 5, place())))
    plan = Plan(2, (parted, Pipeline(2, (stage(0, 5, place()),))))
    memory = world(zero=1, runtime=SHARES).estimator.estimate(plan).memory
    assert memory[1][0].optimizer == pytest.approx(12 * (2400 / 3 + 3600 / 2))


# Other parts -----------------------------------------------------------------------------------


def test_tied_tensor_counts_once_in_a_stage_with_both_layers() -> None:
    tied, untied = (
        world_of(Job("fixed", small_model(tied=tied), 8, 128, precision="fp16"))
        for tied in (True, False)
    )
    layers = len(small_model().layers)
    whole = Plan(1, (Pipeline(8, (stage(0, layers, place()),)),))
    apart = Plan(1, (Pipeline(8, (stage(0, 3, place()), stage(3, layers, place()))),))
    shared = 512 * 64
    (one,), (other,) = devices(tied, whole), devices(untied, whole)
    assert one.parameters == other.parameters - 2 * shared
    assert one.parameters == 2 * small_model(tied=True).parameters
    assert [d.parameters for d in devices(tied, apart)] == [
        d.parameters for d in devices(untied, apart)
    ]


def test_megatron_keeps_outputs_and_flattens_gradients() -> None:
    here = world(runtime="megatron-deepspeed")
    first, last = devices(here, two_stages())
    boundary = 2 * SAMPLES * TOKENS * WIDTH
    assert first.activations == 2 * (2 * SAMPLES * TOKENS * 23 + boundary)
    assert last.activations == 2 * SAMPLES * TOKENS * 47
    assert first.communication == boundary + 4 * 2400
    assert last.communication == boundary + 4 * 3600


def test_split_stage_reports_its_fullest_place() -> None:
    """Three quarters of the samples on a small GPU are fuller than a quarter on a large one."""
    uneven = Stage((0, 5), 1, (place("T4"), place("GH-96")), "none", (3, 1))
    (told,) = devices(world(), Plan(4, (Pipeline(2, (uneven,)),)))
    assert told.capacity == world().cluster.catalogue.gpu("T4").usable_memory_bytes
    assert told.activations == 2 * 3 * TOKENS * (3 + 3 * 20 + 7)


def test_memory_shortage_is_reported() -> None:
    big = world(model=replace(model(), layers=(*model().layers[:4], layer(
        "out", parameters=8 * 10**9, kept=7, checkpoint=0, transient=50, kind="head"
    ))))  # fmt: skip
    first, last = devices(big, two_stages())
    assert first.fits
    assert not last.fits
    assert not big.estimator.estimate(two_stages()).fits
    told = big.estimator.memory_shortages(two_stages())
    assert [(one.pipelines, one.stage) for one in told] == [((0,), 1)]
    assert told[0].needed_bytes == last.total


def test_shortage_under_zero1_is_reported_too() -> None:
    """Its cures are tried on plans in which some layers are on no stage."""
    big = world(model=replace(model(), layers=(*model().layers[:4], layer(
        "out", parameters=8 * 10**9, kept=7, checkpoint=0, transient=50, kind="head"
    ))), zero=1)  # fmt: skip
    (told,) = big.estimator.memory_shortages(two_stages())
    assert told.stage == 1


def test_cures_are_checked_with_all_replicas() -> None:
    """Recomputation makes this stage fit, but only with the optimizer shared by eight.

    A cure tried on the pipeline alone would leave its optimizer state a single owner.
    """
    blocks = (
        layer("b", parameters=6 * 10**8, kept=6 * 10**7, checkpoint=10**7, transient=30),
        *model().layers[2:],
    )
    big = replace(model(), layers=(model().layers[0], *blocks))
    for zero, cured in ((1, True), (0, False)):
        here = world(model=big, zero=zero, runtime=SHARES)
        plan = replace(two_stages(replicas=8), schedule="gpipe")
        (told,) = here.estimator.memory_shortages(plan)
        assert (told.stage, told.pipelines) == (0, tuple(range(8)))
        assert any("recompute" in cure for cure in told.cures) == cured


def test_as_few_layers_are_recomputed_as_make_a_stage_fit() -> None:
    block = layer("b", parameters=1600, kept=4 * 10**7, checkpoint=10, transient=30)
    many = replace(model(), layers=(model().layers[0], *(block,) * 30, model().layers[-1]))

    def plan(recompute: Recompute | int) -> Plan:
        last = stage(20, 32, place(), recompute=recompute)
        return Plan(2, (Pipeline(2, (stage(0, 20, place(), recompute="full"), last)),))

    here = world(model=many)
    fits = [here.estimator.estimate(plan(n)).memory[0][1].fits for n in range(1, 12)]
    fewest = 1 + fits.index(True)
    assert fits == sorted(fits)
    assert fewest > 2
    for before in ("none", 1, 2):
        (told,) = here.estimator.memory_shortages(plan(before))
        assert told.cures[0] == f'with "recompute": {fewest}'


def test_a_gpu_without_bf16_keeps_what_a_job_in_fp32_keeps_and_sends_bf16() -> None:
    bf16, fp32 = (world(precision=precision) for precision in ("bf16", "fp32"))
    for recompute in ("none", "full"):
        plan = two_stages(replicas=2, recompute=recompute)
        for one, other in zip(devices(bf16, plan), devices(fp32, plan), strict=True):
            boundary = 2 * SAMPLES * TOKENS * WIDTH
            assert replace(one, communication=boundary + BUCKETS) == one
            assert one == replace(other, communication=one.communication)
    # Beside it an A100 keeps half.
    mixed = Plan(2, (Pipeline(6, (stage(0, 2, place("A100-40")), stage(2, 5, place()))),))
    first, last = devices(bf16, mixed)
    assert first.activations == 2 * 2 * SAMPLES * TOKENS * (3 + 20)
    assert last.activations == 4 * SAMPLES * TOKENS * (20 + 20 + 7)
    assert (first.parameters, last.parameters) == (2 * (800 + 1600), 4 * (1600 + 1600 + 400))
    assert (first.optimizer, last.optimizer) == (12 * (800 + 1600), 8 * (1600 + 1600 + 400))


def test_cures_name_only_tp_degrees_that_the_model_supports() -> None:
    """Three heads can be split over three ranks, not over two."""
    first, _, *others = model().layers
    large = layer("b", parameters=10**9, kept=20, checkpoint=4, transient=30)
    three = replace(model(), heads=3, kv_heads=3, ffn=15, layers=(first, large, *others))
    (told,) = world(model=three, max_tp=3).estimator.memory_shortages(two_stages())
    assert [cure for cure in told.cures if "TP" in cure] == ["with TP 3"]
    # Plans have no degree that does not divide the largest.
    (told,) = world(model=three, max_tp=4).estimator.memory_shortages(two_stages())
    assert not any("TP" in cure for cure in told.cures)
