"""The trace shows every pass once, at the moments that the estimate counts with."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise

import pytest

from sailord.plots import timeline
from sailord.plots.timeline import bare_lanes, lanes_of, trace, write_timeline
from simulator.documents.problems import InputError
from simulator.hardware.runtime_constants import platform_of
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan
from simulator.traces.perfetto import span_text
from tests.simulator.worlds import place, random_plan, random_world, small_model, stage, world_of

NEAR, FAR = place(), place("A100-40", "europe-west4-a")


def small_job(*, gradient_sync="overlap"):
    return Job(
        name="small", model=small_model(), global_batch=8, sequence=128, max_tp=4,
        gradient_sync=gradient_sync,
    )  # fmt: skip


def two_stages(micro_batches, *, where=NEAR):
    return Pipeline(micro_batches, (stage(0, 3, where, tp=2), stage(3, 6, where)))


@pytest.fixture(scope="module")
def judge():
    return world_of(small_job()).estimator


def complete_events(document):
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def names(document, kind):
    return {
        (event["pid"], event["tid"]) if kind == "thread_name" else event["pid"]: event["args"][
            "name"
        ]
        for event in document["traceEvents"]
        if event["name"] == kind
    }


def trace_of(plan, judge):
    return trace(plan, judge, iteration_s=judge.estimate(plan).iteration_s)


def test_pipelines_and_device_groups_are_named(judge):
    plan = Plan(2, (two_stages(3), two_stages(4, where=FAR)))
    document = trace_of(plan, judge)
    assert list(names(document, "process_name").values()) == [
        "one iteration, 14 samples",
        "pipeline 0",
        "pipeline 1",
    ]
    assert list(names(document, "thread_name").values()) == [
        "iteration",
        "stage 0: layers 0-2, V100-16 x2 in us-central1-a",
        "stage 0: gradient sync",
        "stage 1: layers 3-5, V100-16 x1 in us-central1-a",
        "stage 1: gradient sync",
        "stage 0: layers 0-2, A100-40 x2 in europe-west4-a",
        "stage 0: gradient sync",
        "stage 1: layers 3-5, A100-40 x1 in europe-west4-a",
        "stage 1: gradient sync",
    ]


def test_reserved_process_and_thread_ids_are_not_used(judge):
    document = trace_of(Plan(2, (two_stages(3),)), judge)
    for event in complete_events(document):
        assert event["pid"] > 0
        assert event["tid"] not in (0, event["pid"])


def test_a_pass_names_its_micro_batch_and_layers(judge):
    document = trace_of(Plan(2, (two_stages(3),)), judge)
    (event,) = (e for e in complete_events(document) if e["name"] == "B1" and e["tid"] % 2 == 0)
    assert event["args"] == {"micro_batch": 1, "layers": "0-2"}


def test_equal_pipelines_are_shown_once(judge):
    plan = Plan(2, (two_stages(3), two_stages(4), two_stages(3)))
    assert [lane.title for lane in lanes_of(plan, judge)] == ["pipeline 0 (x2)", "pipeline 1"]
    assert [lane.pipelines for lane in lanes_of(plan, judge)] == [(0, 2), (1,)]
    assert [lane.pipelines for lane in bare_lanes(plan)] == [(0, 2), (1,)]


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_give_consistent_timelines(seed):
    rng = random.Random(seed)
    world = random_world(rng)
    divides = seed >= 25
    only = {"schedules": ("zero-bubble",)} if divides else {}
    plan = random_plan(rng, world, **only)
    kinds = ("forward", "backward", "weights")[: 3 if divides else 2]
    estimate = world.estimator.estimate(plan)
    lanes = lanes_of(plan, world.estimator)
    assert sorted(p for lane in lanes for p in lane.pipelines) == list(range(len(plan.pipelines)))
    for lane in lanes:
        pipeline = plan.pipelines[lane.pipelines[0]]
        busy = defaultdict(list)
        for row in lane.rows:
            passes = [bar for bar in row.work if bar.kind != "optimizer"]
            chunks = [pipeline.stages[k] for k in range(row.stage, len(pipeline.stages))
                      if k % plan.group_count(pipeline) == row.stage]  # fmt: skip
            assert sorted((b.kind, b.layers, b.micro_batch) for b in passes) == sorted(
                (kind, chunk.layers, m)
                for kind in kinds
                for chunk in chunks
                for m in range(pipeline.micro_batches)
            )
            for bars in (row.work, row.sync):
                assert all(b.end_s <= a.start_s * (1 + 1e-12) for b, a in pairwise(bars))
            assert row.work[-1].end_s <= estimate.iteration_s * (1 + 1e-9)
            busy[row.stage].append(sum(bar.end_s - bar.start_s for bar in passes))
        for p in lane.pipelines:
            for s, seconds in busy.items():
                assert max(seconds) == pytest.approx(estimate.stages[p][s].compute_s)


def test_the_last_optimizer_step_ends_the_iteration(judge):
    plan = Plan(2, (two_stages(3), two_stages(4, where=FAR)))
    last = max(row.work[-1].end_s for lane in lanes_of(plan, judge) for row in lane.rows)
    between_s = max(platform_of(where.gpu).iteration_s for where in (NEAR, FAR))
    assert judge.estimate(plan).iteration_s == pytest.approx(last + between_s, rel=1e-9)


@pytest.mark.parametrize("gradient_sync", ["overlap", "serial"])
def test_gradients_are_summed_before_the_optimizer_steps(gradient_sync):
    judge = world_of(small_job(gradient_sync=gradient_sync)).estimator
    plan = Plan(2, (two_stages(3), two_stages(4, where=FAR)))
    for lane in lanes_of(plan, judge):
        for row in lane.rows:
            passes, step = row.work[:-1], row.work[-1]
            assert row.sync, "every layer has two holders"
            assert step.start_s >= max(bar.end_s for bar in row.sync) * (1 - 1e-12)
            if gradient_sync == "serial":
                assert row.sync[0].start_s >= passes[-1].end_s


def test_all_holders_sum_a_layer_at_the_same_moment(judge):
    plan = Plan(2, (two_stages(3), two_stages(4, where=FAR)))
    near, far = lanes_of(plan, judge)
    assert [row.sync for row in near.rows] == [row.sync for row in far.rows]


def test_events_touch_but_never_overlap_in_whole_nanoseconds(judge):
    document = trace_of(Plan(2, (two_stages(5), two_stages(4, where=FAR))), judge)
    threads = defaultdict(list)
    for event in complete_events(document):
        start = round(event["ts"] * 1000)
        threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    assert len(threads) == 9
    for spans in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_layer_spans_are_inclusive():
    assert (span_text((0, 13)), span_text((4, 5))) == ("0-12", "4")


def test_the_file_is_the_trace_and_always_the_same(judge, tmp_path):
    plan = Plan(2, (two_stages(3), two_stages(4, where=FAR)))
    for name in ("a.json", "b.json"):
        write_timeline(plan, judge, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == trace_of(plan, judge)


def test_too_many_passes_are_refused_before_they_are_counted_out(judge, monkeypatch):
    monkeypatch.setattr(timeline, "PASSES_MAX", 27)
    plan = Plan(2, (two_stages(3), two_stages(4), two_stages(3)))
    with pytest.raises(InputError) as caught:
        lanes_of(plan, judge)
    (problem,) = caught.value.problems
    assert problem.what.startswith("its 2 different pipelines have 28 passes")
    assert "fewer micro batches" in problem.cure
    monkeypatch.setattr(timeline, "PASSES_MAX", 28)
    assert len(lanes_of(plan, judge)) == 2


def test_an_unwritable_path_is_an_error(judge, tmp_path):
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(InputError, match=r"cannot be written: No such file"):
        write_timeline(Plan(2, (two_stages(3),)), judge, path)
