"""The zero-bubble schedule: against the oracle, against published figures, and what it keeps."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from simulator.estimate.pass_order import device_orders, held_at_most
from simulator.estimate.schedule_replay import Edge, GroupTimes, ScheduleReplay, replay
from simulator.hardware.runtime_constants import Messaging
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.estimate.oracle_adapter import judge
from tests.simulator.worlds import place, random_plan, random_world, stage


def drawn(rng: random.Random, widths: list[int]) -> tuple[list[GroupTimes], list[Edge]]:
    """Draw groups with any times; ``widths`` has the number of groups of each stage."""
    groups: list[GroupTimes] = []
    for s, width in enumerate(widths):
        for _ in range(width):
            before, behind = s > 0, s < len(widths) - 1
            backward = rng.choice([0.0, 1.0, rng.uniform(0.1, 3.0)])
            groups.append(
                GroupTimes(
                    s,
                    rng.choice([0.0, 1.0, rng.uniform(0.1, 3.0)]),
                    backward,
                    before * rng.uniform(0.0, 0.3),
                    behind * rng.uniform(0.0, 0.3),
                    behind * rng.uniform(0.0, 0.3),
                    before * rng.uniform(0.0, 0.3),
                    weight=backward * rng.choice([0.0, 0.5, 1.0, rng.random()]),
                )
            )
    starts = [0, *accumulate(widths)]
    edges = [
        Edge(a, b, rng.uniform(0.0, 2.0), rng.uniform(0.0, 2.0))
        for (low, middle), high in zip(pairwise(starts), starts[2:], strict=False)
        for a in range(low, middle)
        for b in range(middle, high)
    ]
    return groups, edges


@pytest.mark.sim
@pytest.mark.parametrize("messaging", ["buffered", "blocking"])
def test_zero_bubble_matches_the_oracle(messaging: Messaging, examples: int) -> None:
    rng = random.Random(f"zero-bubble {messaging}")
    for _ in range(examples):
        widths = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 7))]
        groups, edges = drawn(rng, widths)
        count = rng.randint(1, 16)
        found = replay(
            groups, edges, schedule="zero-bubble", micro_batches=count, messaging=messaging
        )
        verdict = judge(
            groups, edges, micro_batches=count, schedule="zero-bubble", messaging=messaging
        )
        assert len(found.spans) == len(verdict.spans) == 3 * count * len(groups)
        for span in found.spans:
            expected = verdict.spans[span.group, span.kind, span.micro_batch]
            assert (span.start, span.end) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        ends = [end for _, end in verdict.last_backward]
        assert found.last_backward_end == pytest.approx(ends, rel=1e-9)
        assert found.free == pytest.approx(verdict.free, rel=1e-9)


def run(
    stages: int, micro_batches: int, forward: float, inputs: float, weights: float
) -> ScheduleReplay:
    """Equal stages without messages."""
    groups = [GroupTimes(s, forward, inputs + weights, weight=weights) for s in range(stages)]
    edges = [Edge(s, s + 1, 0.0, 0.0) for s in range(stages - 1)]
    return replay(
        groups, edges, schedule="zero-bubble", micro_batches=micro_batches, messaging="buffered"
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_the_bubble_is_the_published_one(stages: int, rounds: int) -> None:
    """(p - 1)(F + B - W): a third of 1F1B's for equal passes."""
    for forward, inputs, weights in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.7), (1.0, 2.0, 1.0)):
        count = rounds * stages
        found = run(stages, count, forward, inputs, weights)
        work = count * (forward + inputs + weights)
        bubble = (stages - 1) * (forward + inputs - weights)
        assert max(found.free) == pytest.approx(work + bubble)


def test_the_diagram_of_three_stages() -> None:
    """Drawn by hand for four micro batches and passes of 1 s; a dot is 1 s of waiting."""
    found = run(3, 4, 1.0, 1.0, 1.0)
    rows = [["."] * 14 for _ in range(3)]
    for span in found.spans:
        rows[span.group][round(span.start)] = {"F": "abcd", "B": "1234", "W": "ABCD"}[span.kind][
            span.micro_batch
        ]
    assert ["".join(row) for row in rows] == [
        "abc..1Ad2B3C4D",
        ".ab.1c2Ad3B4CD",
        "..a1b2c3Ad4BCD",
    ]


def test_each_pass_is_run_once_and_the_weights_follow_their_backward() -> None:
    for stages in range(1, 6):
        for count in range(1, 8):
            for s, order in enumerate(
                device_orders("zero-bubble", stages=stages, micro_batches=count)
            ):
                done = [(op.kind, op.micro_batch) for op in order]
                assert sorted(done) == sorted((kind, m) for kind in "FBW" for m in range(count))
                assert all(done.index(("B", m)) < done.index(("W", m)) for m in range(count))
                whole = device_orders("1f1b", stages=stages, micro_batches=count)[s]
                assert [op for op in order if op.kind != "W"] == whole


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (1, 4), (3, 4), (9, 4), (9, 1)])
def test_all_stages_hold_as_many_micro_batches_as_the_first_of_1f1b(
    count: int, stages: int
) -> None:
    """In full, or what the gradient of the weights needs of them."""
    for s in range(stages):
        moments = held_at_most("zero-bubble", device=s, stages=stages, micro_batches=count)
        assert max(full for full, _ in moments) == min(count, stages - s)
        assert max(map(sum, moments)) == min(count, stages)


def test_activations_are_those_in_full_and_those_for_the_weights() -> None:
    rng = random.Random(0)
    for _ in range(20):
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("zero-bubble",), splits=False)
        plain = replace(plan, schedule="1f1b")
        costs, size = world.costs, plan.micro_batch_size
        memory, less = (world.estimator.estimate(each).memory for each in (plan, plain))
        for pipeline, row, below in zip(plan.pipelines, memory, less, strict=True):
            for s, (one, device, other) in enumerate(zip(pipeline.stages, row, below, strict=True)):
                span = slice(*one.layers)
                pending = costs.kept_for_weights(tp=one.tp, samples=size, gpu=one.place.gpu)[span]
                held = min(pipeline.micro_batches, len(pipeline.stages) - s)
                each = other.activations / held
                moments = held_at_most(
                    "zero-bubble",
                    device=s,
                    stages=len(pipeline.stages),
                    micro_batches=pipeline.micro_batches,
                )
                expected = max(full * each + part * pending.sum() for full, part in moments)
                assert device.activations == pytest.approx(expected)
                assert device.activations >= other.activations * (1 - 1e-12)


def test_a_single_stage_takes_as_long_as_under_1f1b() -> None:
    world = random_world(random.Random(1))
    layers = len(world.job.model.layers)
    plan = Plan(1, (Pipeline(4, (stage(0, layers, place()),)),))
    divided = replace(plan, schedule="zero-bubble")
    plain, found = (world.estimator.estimate(each).iteration_s for each in (plan, divided))
    assert found == pytest.approx(plain)
