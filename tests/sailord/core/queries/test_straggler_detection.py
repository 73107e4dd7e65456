"""Stragglers: against peers with equal work, peers of the same GPU kind, and a node's own past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from agents.protocol.records import NodeId
from sailord.core.model.options import Options
from sailord.core.model.stragglers import NodeSpeeds, StepSample, Straggler
from sailord.core.queries.straggler_detection import look

OPTIONS = Options(slow_times=1.5, slow_steps=10, slow_s=60.0)
NAMES = [NodeId(f"n{number}") for number in range(8)]


def samples(*factors: float, work_s: float = 0.1, gpu: str = "V100-16") -> dict[NodeId, StepSample]:
    """Nodes with the same work, each at its multiple of what was predicted."""
    return {
        id_: StepSample(gpu, 0, work_s, work_s * factor)
        for id_, factor in zip(NAMES, factors, strict=False)
    }


def others(*factors: float) -> dict[NodeId, StepSample]:
    """The same, where no two nodes have the same work."""
    plain = samples(*factors)
    each = ((id_, 0.1 + 0.05 * number) for number, id_ in enumerate(plain))
    return {
        id_: replace(plain[id_], predicted_s=work_s, measured_s=work_s * plain[id_].factor)
        for id_, work_s in each
    }


def at(step: int, measured: Mapping[NodeId, StepSample]) -> dict[NodeId, StepSample]:
    return {id_: replace(sample, step=step) for id_, sample in measured.items()}


def seen(
    *measured: Mapping[NodeId, StepSample], relative_error: float = 0.0, steps: int = 1
) -> NodeSpeeds:
    """What is known after these looks, ten seconds and some steps from one to the next."""
    watch = NodeSpeeds(generation=1)
    for number, one in enumerate(measured):
        step = OPTIONS.slow_steps + steps * number
        watch = look(
            watch,
            at(step, one),
            now=10.0 * number,
            relative_error=relative_error,
            options=OPTIONS,
            stepped=(100 + 10.0 * number, step),
        )
    return watch


def test_prediction_error_of_a_gpu_kind_makes_no_straggler():
    watch = seen(samples(2.5, 2.6, 2.4, 2.5))
    assert watch.slow == {}
    assert watch.factors == {"V100-16": pytest.approx(2.5)}


def test_node_slower_than_peers_with_equal_work_is_a_straggler():
    watch = seen(samples(2.5, 2.6, 5.2, 2.4))
    assert list(watch.slow) == [NAMES[2]]
    assert watch.slow[NAMES[2]].times == pytest.approx(2.08)
    assert watch.slow[NAMES[2]].against == "others with the same work"


def test_a_straggler_knows_by_how_much_it_delayed_all_steps():
    crawls = samples(1.0, 1.0, 3.0, 1.0)  # 0.1 s are predicted, and 0.3 s measured.
    watch = seen(samples(1.0, 1.0, 1.0, 1.0), crawls, crawls, crawls, steps=5)
    assert watch.slow[NAMES[2]].delay_s == pytest.approx(2 * 5 * 0.2)


def test_other_gpu_kinds_are_not_compared():
    fast, slow = samples(1.0, 1.0, 1.0), samples(*[9.0] * 6, gpu="A100-40")
    last = {id_: slow[id_] for id_ in NAMES[3:6]}
    assert seen({**fast, **last}).slow == {}


@pytest.mark.parametrize(("relative_error", "is_slow"), [(0.05, True), (0.4, False)])
def test_other_work_is_compared_with_room_for_the_prediction_error(relative_error, is_slow):
    watch = seen(others(1.0, 1.0, 1.8, 1.0), relative_error=relative_error)
    assert (NAMES[2] in watch.slow) == is_slow


def test_one_peer_is_too_few_to_compare():
    twins = {**others(1.0, 1.8, 1.0, 1.0)}
    twins[NAMES[1]] = replace(twins[NAMES[0]], measured_s=twins[NAMES[0]].predicted_s * 1.8)
    assert seen(twins, relative_error=0.4).slow == {}


def test_two_peers_are_compared_with_their_own_past_only():
    alone = others(1.0, 3.0)
    assert seen(alone).slow == {}, "which of them is as it should be?"
    watch = seen(alone, others(1.0, 6.0))
    assert list(watch.slow) == [NAMES[1]]
    assert watch.slow[NAMES[1]].against == "it did before"


def test_slowdown_of_all_makes_no_straggler():
    assert seen(others(1.0, 1.3, 1.2), others(2.0, 2.6, 2.4)).slow == {}


def test_speedup_of_others_makes_no_straggler():
    assert seen(others(2.0, 2.0), others(1.0, 2.0)).slow == {}


def test_first_steps_are_not_judged():
    early = at(OPTIONS.slow_steps - 1, samples(1.0, 1.0, 9.0, 1.0))
    watch = look(NodeSpeeds(1), early, now=0.0, relative_error=0.0, options=OPTIONS)
    assert (watch.slow, watch.past) == ({}, {})


def test_straggler_needs_both_steps_and_seconds():
    crawls = samples(1.0, 1.0, 3.0, 1.0)
    watch = seen(*[crawls] * 6, steps=5)
    slow = watch.slow[NAMES[2]]
    assert (slow.since, slow.since_step, slow.step) == (0.0, 10, 35)
    assert watch.found(59.0, OPTIONS) == {}, "many steps in a short time"
    assert list(watch.found(60.0, OPTIONS)) == [NAMES[2]]
    few = seen(*[crawls] * 8, steps=1)
    assert few.found(1000.0, OPTIONS) == {}, "few steps in a long time"


def test_break_restarts_the_count():
    crawls, fine = samples(1.0, 1.0, 3.0, 1.0), samples(1.0, 1.0, 1.0, 1.0)
    watch = seen(crawls, crawls, fine, crawls)
    assert watch.slow[NAMES[2]].since == 30.0


def test_slowest_come_first():
    found = {
        NAMES[0]: Straggler(2.0, "it did before", 0.0, 0, 100),
        NAMES[1]: Straggler(3.0, "it did before", 0.0, 0, 100),
    }
    assert list(NodeSpeeds(slow=found).found(100.0, OPTIONS)) == [NAMES[1], NAMES[0]]


def test_a_node_is_slow_against_the_best_that_it_held_and_not_against_its_first_steps():
    """The prediction is three times too slow, and the node began on a busy machine."""
    begun, well, slow = others(1.0, 1.0), others(0.33, 0.33), others(0.33, 1.32)
    calm = [well] * (2 * OPTIONS.slow_steps + 2)
    watch = seen(begun, *calm, slow)
    assert list(watch.slow) == [NAMES[1]]
    assert watch.slow[NAMES[1]].times == pytest.approx(4.0)
    assert str(watch.slow[NAMES[1]]) == (
        "it computes 4.0 times as long as it did before, since step 33"
    )


def test_a_few_quick_steps_make_no_better_past():
    usual, quick = others(1.0, 1.0), others(1.0, 0.4)
    window = [*[usual] * (OPTIONS.slow_steps - 2), quick, quick]
    assert seen(usual, *window * 3, usual).slow == {}


def test_a_straggler_is_told_before_it_is_left_out():
    watch = seen(*[samples(1.0, 1.0, 3.0, 1.0)] * 3, steps=5)
    assert watch.told(14.0, OPTIONS) == {}
    assert list(watch.told(15.0, OPTIONS)) == [NAMES[2]]
    assert watch.found(15.0, OPTIONS) == {}


def test_a_slowdown_of_all_is_one_of_the_job():
    watch = seen(samples(1.0, 1.0, 1.1, 1.0), samples(4.0, 4.2, 4.1, 4.0))
    assert watch.slow == {}
    assert str(watch.job) == (
        "it computes 4.0 times as long as before on all nodes alike, since step 11"
    )
    assert seen(samples(1.0, 1.0), samples(4.0, 1.0)).job is None, "one of two is a straggler"
    assert seen(samples(1.0, 1.0), samples(4.0, 4.0), samples(1.0, 1.0)).job is None, "it is over"


def paced(*step_s: float, factor: float = 1.0) -> NodeSpeeds:
    """What is known after steps of these seconds, while all nodes compute alike."""
    watch, now = NodeSpeeds(1), 100.0
    for number, seconds in enumerate(step_s):
        now, step = now + seconds, OPTIONS.slow_steps + number
        watch = look(
            watch,
            at(step, samples(factor, factor)),
            now=now,
            relative_error=0.0,
            options=OPTIONS,
            stepped=(now, step),
        )
    return watch


def test_slower_steps_though_no_node_computes_longer_are_a_slowdown_of_the_job():
    watch = paced(*[1.0] * 30, *[4.0] * 20)
    assert watch.slow == {}
    assert str(watch.job) == (
        "it takes 4.0 times as long as before for a step, and no node computes as much longer,"
        " since step 46"
    )
    assert watch.job is not None
    assert watch.job.has_lasted(watch.job.since + 60.0, OPTIONS)


def test_steps_are_slow_from_the_same_multiple_as_a_node_is():
    assert paced(*[1.0] * 30, *[1.4] * 20).job is None
    watch = paced(*[1.0] * 30, *[1.7] * 20)
    assert watch.job is not None
    assert (watch.job.verb, watch.job.times) == ("takes", pytest.approx(1.7))
    less = paced(*[1.0] * 30, *[2.2] * 20, *[1.4] * 20)
    assert less.job is not None, "a third of that has not gone"
    assert less.job.since < 150


def test_evaluations_and_snapshots_between_steps_slow_no_job():
    assert paced(*[*[1.0] * 9, 60.0] * 6).job is None
    assert paced(*[1.0] * 30, *[1.0, 60.0, 60.0] * 10).job is None, "in most looks"


def test_a_node_near_the_threshold_stays_slow_until_a_third_of_that_has_gone():
    at_first, slow, less, well = (samples(1.0, 1.0, f, 1.0) for f in (1.0, 1.6, 1.4, 1.3))
    assert seen(at_first, slow, less, slow).slow[NAMES[2]].since == 10.0
    assert seen(at_first, slow, well, slow).slow[NAMES[2]].since == 30.0
    assert seen(at_first, less).slow == {}


def test_what_slow_nodes_cost_is_counted_once_and_for_the_slowest():
    crawl = samples(1.0, 3.0, 3.1, 1.0, 1.0)
    slow = seen(samples(*[1.0] * 5), crawl, crawl, steps=20).slow
    assert {id_: one.delay_s for id_, one in slow.items()} == {
        NAMES[1]: 0.0,
        NAMES[2]: pytest.approx(20 * (0.31 - 0.1)),
    }


def test_a_node_has_recovered_if_it_was_measured_and_not_all_are_as_slow():
    usual, crawl = samples(*[1.0] * 5), samples(1.0, 1.0, 3.0, 1.0, 1.0)
    begin = (usual, usual, crawl, crawl)
    assert seen(*begin, usual).recovered == {NAMES[2]}
    assert not seen(*begin, crawl).recovered
    assert not seen(*begin, usual, usual).recovered, "it is told once"
    unmeasured = {id_: each for id_, each in usual.items() if id_ != NAMES[2]}
    assert not seen(*begin, unmeasured).recovered
    assert not seen(*begin, samples(*[3.0] * 5)).recovered
