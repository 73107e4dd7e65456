"""Schedules against the oracle: all messaging modes, any shape, ties, zeros and repetition."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from simulator.arrays import Floats
from simulator.estimate import schedule_1f1b
from simulator.estimate.pass_order import device_orders, held_at_most
from simulator.estimate.schedule_1f1b import PassDurations, run_1f1b
from simulator.estimate.schedule_replay import Edge, GroupTimes, ScheduleReplay, replay
from simulator.hardware.runtime_constants import Messaging
from simulator.spec.plan import Schedule
from tests.simulator.estimate.oracle_adapter import Verdict, judge

MESSAGINGS: tuple[Messaging, ...] = ("buffered", "blocking", "lockstep")


def seconds(rng: random.Random, kind: str) -> float:
    """Draw durations with ties, zeros, different orders of magnitude, or none of these."""
    if kind == "ties":
        return float(rng.choice([0, 1, 1, 2, 3]))
    if kind == "wild":
        return rng.choice([0.0, 10 ** rng.uniform(-6, 3)])
    return rng.uniform(0.1, 3.0)


def chain(rng: random.Random, stages: int) -> tuple[list[GroupTimes], list[Edge]]:
    kind = rng.choice(["ties", "wild", "even", "equal"])
    one = [seconds(rng, "even") for _ in range(8)]

    def draw(index: int, *, often: float = 1.0) -> float:
        if rng.random() > often:
            return 0.0
        return one[index] if kind == "equal" else seconds(rng, kind)

    quiet = rng.choice([0.0, 1.0])  # With and without overheads of messages.
    groups = [
        GroupTimes(
            stage=s,
            forward=draw(0),
            backward=draw(1),
            receive_activation=draw(2, often=quiet) if s else 0.0,
            receive_gradient=draw(3, often=quiet) if s < stages - 1 else 0.0,
            send_activation=draw(4, often=quiet) if s < stages - 1 else 0.0,
            send_gradient=draw(5, often=quiet) if s else 0.0,
        )
        for s in range(stages)
    ]
    edges = [Edge(s, s + 1, draw(6), draw(7)) for s in range(stages - 1)]
    return groups, edges


def durations(chains: list[tuple[list[GroupTimes], list[Edge]]]) -> PassDurations:
    """Return the durations of chains of equal length as columns."""
    stages = len(chains[0][0])

    def grid(name: str) -> Floats:
        return np.array([[getattr(group, name) for group in groups] for groups, _ in chains]).T

    activation, gradient = np.zeros((2, stages, len(chains)))
    for column, (_, edges) in enumerate(chains):
        for edge in edges:
            activation[edge.source, column] = edge.activation
            gradient[edge.target, column] = edge.gradient
    return PassDurations(
        forward=grid("forward"),
        backward=grid("backward"),
        activation=activation,
        gradient=gradient,
        receive_activation=grid("receive_activation"),
        receive_gradient=grid("receive_gradient"),
        send_activation=grid("send_activation"),
        send_gradient=grid("send_gradient"),
    )


def assert_unrolled_as(verdict: Verdict, unrolled: ScheduleReplay) -> None:
    for span in unrolled.spans:
        begin, end = verdict.spans[span.group, span.kind, span.micro_batch]
        assert (span.start, span.end) == pytest.approx((begin, end), rel=1e-9, abs=1e-12)
    assert len(unrolled.spans) == len(verdict.spans)
    ends = [end for _, end in verdict.last_backward]
    assert unrolled.last_backward_end == pytest.approx(ends, rel=1e-9)
    assert unrolled.free == pytest.approx(verdict.free, rel=1e-9)


# 1F1B in columns ------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.parametrize("messaging", MESSAGINGS)
def test_1f1b_matches_the_oracle(messaging: Messaging, examples: int) -> None:
    rng = random.Random(f"1f1b {messaging}")
    for _ in range(max(examples, 4)):
        stages = rng.randint(1, 8)
        # Long enough for repeats to be skipped in some, short enough to be all warm-up in others.
        micro_batches = rng.choice([rng.randint(1, 6), rng.randint(1, 40), rng.randint(20, 80)])
        chains = [chain(rng, stages) for _ in range(rng.randint(1, 4))]
        finish = run_1f1b(durations(chains), micro_batches=micro_batches, messaging=messaging)
        for column, (groups, edges) in enumerate(chains):
            verdict = judge(
                groups, edges, micro_batches=micro_batches, schedule="1f1b", messaging=messaging
            )
            ends = [end for _, end in verdict.last_backward]
            # The last message may outlast the last backward by far: an absolute part is due.
            far = 1e-12 * max(verdict.free)
            assert finish.last_backward_end[:, column] == pytest.approx(ends, rel=1e-9, abs=far)
            assert finish.free[:, column] == pytest.approx(verdict.free, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["_Eager", "_Lockstep"])
def test_skipping_repeated_rounds_changes_no_result(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most pipelines settle into a repeating pattern, of which only the first rounds are run."""
    original = getattr(schedule_1f1b, kind)
    steps: list[int] = []

    class Counting(original):  # type: ignore[misc]  # chosen at run time
        def step(self, slot: int) -> None:
            steps[-1] += 1
            super().step(slot)

    monkeypatch.setattr(schedule_1f1b, kind, Counting)
    messaging: Messaging = "buffered" if kind == "_Eager" else "lockstep"
    rng = random.Random(f"repeats {kind}")
    jumped = 0
    cases = 60
    for _ in range(cases):
        stages, micro_batches = rng.randint(1, 6), rng.randint(60, 80)
        groups, edges = chain(rng, stages)
        steps.append(0)
        finish = run_1f1b(
            durations([(groups, edges)]), micro_batches=micro_batches, messaging=messaging
        )
        jumped += steps[-1] < 2 * (micro_batches + stages - 1)
        verdict = judge(
            groups, edges, micro_batches=micro_batches, schedule="1f1b", messaging=messaging
        )
        assert finish.free[:, 0] == pytest.approx(verdict.free, rel=1e-9)
    assert jumped >= 0.7 * cases, f"only {jumped} of {cases} jumped"


def test_many_micro_batches_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand micro batches take only the steps until the schedule repeats."""
    steps = 0

    class Counting(schedule_1f1b._Eager):
        def step(self, slot: int) -> None:
            nonlocal steps
            steps += 1
            super().step(slot)

    monkeypatch.setattr(schedule_1f1b, "_Eager", Counting)
    groups = [GroupTimes(s, 1.0, 2.0) for s in range(4)]
    free = [Edge(s, s + 1, 0.0, 0.0) for s in range(3)]
    finish = run_1f1b(durations([(groups, free)]), micro_batches=10_000, messaging="buffered")
    assert steps < 100
    # The first stage works all the time but for the bubble: three stages' forward and backward.
    assert finish.free[0, 0] == 10_000 * 3.0 + 3 * 3.0
    slow = [Edge(s, s + 1, 0.25, 0.25) for s in range(3)]
    finish = run_1f1b(durations([(groups, slow)]), micro_batches=10_060, messaging="buffered")
    assert steps < 300
    forty, sixty, eighty = (
        judge(groups, slow, micro_batches=m, schedule="1f1b", messaging="buffered").free
        for m in (40, 60, 80)
    )
    # The pattern spans four micro batches, so that twenty more always add as much.
    assert eighty[0] - sixty[0] == sixty[0] - forty[0]
    assert finish.free[0, 0] == pytest.approx(sixty[0] + 500 * (sixty[0] - forty[0]), rel=1e-12)


@pytest.mark.parametrize("messaging", MESSAGINGS)
def test_warm_up_with_zero_durations_is_not_taken_for_a_repeat(messaging: Messaging) -> None:
    """While the pipeline fills, times do not change for as many slots as there are stages."""
    groups = [GroupTimes(s, 0.0, 1.0) for s in range(8)]
    edges = [Edge(s, s + 1, 0.0, 0.0) for s in range(7)]
    finish = run_1f1b(durations([(groups, edges)]), micro_batches=20, messaging=messaging)
    assert finish.free[0, 0] == 20 + 7


@pytest.mark.parametrize("messaging", MESSAGINGS)
def test_pipelines_with_different_micro_batches_match_single_runs(messaging: Messaging) -> None:
    rng = random.Random(f"lengths {messaging}")
    for stages in (1, 2, 5):
        chains = [chain(rng, stages) for _ in range(6)]
        counts = [rng.choice([1, 2, 7, 30, 90]) for _ in chains]
        together = run_1f1b(durations(chains), micro_batches=counts, messaging=messaging)
        for column, (one, count) in enumerate(zip(chains, counts, strict=True)):
            alone = run_1f1b(durations([one]), micro_batches=count, messaging=messaging)
            for name in ("last_backward_end", "free"):
                ours, theirs = getattr(together, name)[:, column], getattr(alone, name)[:, 0]
                assert ours == pytest.approx(theirs, rel=1e-12), (stages, counts, column)


def test_pipelines_in_one_batch_are_independent() -> None:
    """A pipeline ends alike alone and in a batch, bit-equal where no round is skipped."""
    rng = random.Random("columns")
    chains = [chain(rng, 5) for _ in range(6)]
    for messaging in MESSAGINGS:
        together = run_1f1b(durations(chains), micro_batches=9, messaging=messaging)
        for column, one in enumerate(chains):
            alone = run_1f1b(durations([one]), micro_batches=9, messaging=messaging)
            assert together.free[:, column] == pytest.approx(alone.free[:, 0], rel=1e-12)


def test_a_pipeline_drawn_by_hand() -> None:
    """Two stages, two micro batches, a transfer of 1 each way."""
    groups = [GroupTimes(0, 2.0, 4.0), GroupTimes(1, 2.0, 3.0)]
    edges = [Edge(0, 1, 1.0, 1.0)]
    # Stage 0: F0 0-2, F1 2-4. Stage 1: F0 3-5, B0 5-8, F1 8-10 (there since 5), B1 10-13.
    # Stage 0: B0 9-13, B1 14-18.
    finish = run_1f1b(durations([(groups, edges)]), micro_batches=2, messaging="buffered")
    assert finish.free[:, 0].tolist() == [18.0, 13.0]
    # Blocking: stage 0 F0 0-2 and sends until 3, F1 3-5 until 6. Stage 1: F0 3-5, B0 5-8 and
    # sends until 9, F1 9-11, B1 11-14, sends until 15. Stage 0: B0 9-13, B1 15-19.
    finish = run_1f1b(durations([(groups, edges)]), micro_batches=2, messaging="blocking")
    assert finish.last_backward_end[:, 0].tolist() == [19.0, 14.0]
    assert finish.free[:, 0].tolist() == [19.0, 15.0]


# Pass by pass ------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.parametrize("messaging", MESSAGINGS)
def test_replayed_1f1b_matches_the_oracle_and_the_vectorised_schedule(
    messaging: Messaging, examples: int
) -> None:
    rng = random.Random(f"unrolled {messaging}")
    for _ in range(examples):
        stages, micro_batches = rng.randint(1, 8), rng.randint(1, 24)
        groups, edges = chain(rng, stages)
        unrolled = replay(
            groups, edges, schedule="1f1b", micro_batches=micro_batches, messaging=messaging
        )
        verdict = judge(
            groups, edges, micro_batches=micro_batches, schedule="1f1b", messaging=messaging
        )
        assert_unrolled_as(verdict, unrolled)
        finish = run_1f1b(
            durations([(groups, edges)]), micro_batches=micro_batches, messaging=messaging
        )
        assert finish.free[:, 0] == pytest.approx(unrolled.free, rel=1e-9)


def graph(rng: random.Random) -> tuple[list[GroupTimes], list[Edge]]:
    """Draw stages of one to three groups, each with an edge on either side."""
    kind = rng.choice(["ties", "wild", "even"])
    widths = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
    members: list[list[int]] = []
    groups: list[GroupTimes] = []
    for s, width in enumerate(widths):
        members.append(list(range(len(groups), len(groups) + width)))
        for _ in range(width):
            first, last = s == 0, s == len(widths) - 1
            groups.append(
                GroupTimes(
                    s,
                    seconds(rng, kind),
                    seconds(rng, kind),
                    0.0 if first else seconds(rng, kind),
                    0.0 if last else seconds(rng, kind),
                    0.0 if last else seconds(rng, kind),
                    0.0 if first else seconds(rng, kind),
                )
            )
    edges = []
    for here, there in itertools.pairwise(members):
        pairs = {(rng.choice(here), b) for b in there} | {(a, rng.choice(there)) for a in here}
        edges += [Edge(a, b, seconds(rng, kind), seconds(rng, kind)) for a, b in sorted(pairs)]
    return groups, edges


@pytest.mark.sim
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("messaging", ["buffered", "blocking"])
def test_split_stages_match_the_oracle(
    schedule: Schedule, messaging: Messaging, examples: int
) -> None:
    rng = random.Random(f"split {schedule} {messaging}")
    for _ in range(examples):
        groups, edges = graph(rng)
        micro_batches = rng.randint(1, 16)
        unrolled = replay(
            groups, edges, schedule=schedule, micro_batches=micro_batches, messaging=messaging
        )
        verdict = judge(
            groups, edges, micro_batches=micro_batches, schedule=schedule, messaging=messaging
        )
        assert_unrolled_as(verdict, unrolled)


@pytest.mark.sim
@pytest.mark.parametrize("messaging", ["buffered", "blocking"])
def test_interleaved_matches_the_oracle(messaging: Messaging, examples: int) -> None:
    rng = random.Random(f"interleaved {messaging}")
    compared = 0
    for _ in range(examples):
        devices, chunks = rng.randint(1, 4), rng.randint(1, 3)
        groups, edges = chain(rng, devices * chunks)
        micro_batches = devices * rng.randint(1, 5)
        try:
            verdict = judge(
                groups,
                edges,
                micro_batches=micro_batches,
                schedule="interleaved",
                messaging=messaging,
                devices=devices,
            )
        except AssertionError as stuck:
            pytest.fail(f"{devices=} {chunks=} {micro_batches=}: {stuck}")
        unrolled = replay(
            groups,
            edges,
            schedule="interleaved",
            micro_batches=micro_batches,
            messaging=messaging,
            virtual_stages=chunks,
        )
        assert_unrolled_as(verdict, unrolled)
        assert unrolled.device_of == tuple(s % devices for s in range(devices * chunks))
        compared += 1
    assert compared == examples


# Orders ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_every_pass_is_scheduled_once(schedule: Schedule) -> None:
    for devices in range(1, 6):
        for chunks in (1, 2, 3) if schedule == "interleaved" else (1,):
            for rounds in range(1, 6):
                micro_batches = devices * rounds if schedule == "interleaved" else rounds
                stages = devices * chunks
                orders = device_orders(
                    schedule, stages=stages, micro_batches=micro_batches, virtual_stages=chunks
                )
                assert len(orders) == devices
                for device, order in enumerate(orders):
                    passes = sorted((op.kind, op.stage, op.micro_batch) for op in order)
                    assert passes == sorted(
                        (kind, device + devices * chunk, m)
                        for kind in "FB"
                        for chunk in range(chunks)
                        for m in range(micro_batches)
                    )


def counted(verdict: Verdict, groups: list[int]) -> list[tuple[int, ...]]:
    """Return what each group of a device holds at every moment of the run."""
    passes = sorted(
        (begin, kind, index)
        for (index, kind, _), (begin, _) in verdict.spans.items()
        if index in groups
    )
    held = dict.fromkeys(groups, 0)
    moments = []
    for _, kind, index in passes:
        held[index] += 1 if kind == "F" else -1
        moments.append(tuple(held.values()))
    return moments


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_held_activations_match_the_oracle(schedule: Schedule) -> None:
    """Counted pass by pass, no moment exceeds the charged ones, and each of these occurs."""
    for devices in range(1, 5):
        for chunks in (1, 2, 3) if schedule == "interleaved" else (1,):
            stages = devices * chunks
            groups = [GroupTimes(s, 1.0, 1.0) for s in range(stages)]
            edges = [Edge(s, s + 1, 0.0, 0.0) for s in range(stages - 1)]
            for rounds in range(1, 5):
                micro_batches = devices * rounds if schedule == "interleaved" else rounds
                verdict = judge(
                    groups,
                    edges,
                    micro_batches=micro_batches,
                    schedule=schedule,
                    messaging="buffered",
                    devices=devices if schedule == "interleaved" else None,
                )
                for device in range(devices):
                    moments = counted(verdict, list(range(device, stages, devices)))
                    fullest = held_at_most(
                        schedule,
                        device=device,
                        stages=stages,
                        micro_batches=micro_batches,
                        virtual_stages=chunks,
                    )
                    assert set(fullest) <= set(moments)
                    for moment in moments:
                        assert any(
                            all(n <= most for n, most in zip(moment, one, strict=True))
                            for one in fullest
                        ), (schedule, devices, chunks, micro_batches, device)


# Monotone ------------------------------------------------------------------------


@pytest.mark.parametrize("messaging", MESSAGINGS)
def test_slower_parts_or_more_micro_batches_never_shorten_a_schedule(
    messaging: Messaging, examples: int
) -> None:
    rng = random.Random(f"monotone {messaging}")
    for _ in range(examples):
        stages, micro_batches = rng.randint(1, 6), rng.randint(1, 12)
        groups, edges = chain(rng, stages)
        before = run_1f1b(
            durations([(groups, edges)]), micro_batches=micro_batches, messaging=messaging
        )
        allowance = 1e-12 * before.free.max()
        more = run_1f1b(
            durations([(groups, edges)]), micro_batches=micro_batches + 1, messaging=messaging
        )
        assert (more.free >= before.free - allowance).all()
        index = rng.randrange(stages)
        what = rng.choice(["forward", "backward"])
        slow = list(groups)
        slow[index] = replace(groups[index], **{what: getattr(groups[index], what) + 1.0})
        slower = run_1f1b(
            durations([(slow, edges)]), micro_batches=micro_batches, messaging=messaging
        )
        assert (slower.free >= before.free - allowance).all()
        assert (
            slower.last_backward_end[index] >= before.last_backward_end[index] - allowance
        ).all()
