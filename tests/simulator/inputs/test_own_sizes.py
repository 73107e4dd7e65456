"""Pipelines with micro batch sizes of their own: in files, against a batch, and shared out."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from operator import mul

from hypothesis import given
from hypothesis import strategies as st

from simulator.inputs.plan_check import share_samples
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.inputs.test_plan_file import RAW, A, B, faults, job, mistakes, stages


def test_pipelines_may_state_a_micro_batch_size_of_their_own() -> None:
    raw = {**RAW, "pipelines": [{**RAW["pipelines"][0], "micro_batch_size": n} for n in (2, 8, 8)]}
    plan = read_plan(raw)
    assert (plan.micro_batch_size, plan.size_by_pipeline) == (8, (2, 8, 8))
    assert [p.micro_batch_size for p in plan.pipelines] == [2, None, None]
    same = plan_to_json(plan)
    assert [p.get("micro_batch_size") for p in same["pipelines"]] == [2, None, None]
    assert read_plan(same) == plan
    alike = {**RAW, "pipelines": [{**RAW["pipelines"][0], "micro_batch_size": 4}]}
    assert read_plan(alike) == read_plan(RAW)
    wrong = {**RAW, "pipelines": [{**RAW["pipelines"][0], "micro_batch_size": 0}]}
    assert mistakes(wrong) == [
        "pipelines[0].micro_batch_size: is 0; give a whole number from 1 to 1048576"
    ]


def test_samples_of_pipelines_with_own_sizes_are_the_batch() -> None:
    first, second = stages(A, [0, 26]), stages(B, [0, 26])
    fits = Plan(4, (Pipeline(128, first), Pipeline(64, second, 8)))
    assert faults(fits) == []
    plan = replace(fits, pipelines=(fits.pipelines[0], Pipeline(63, second, 8)))
    assert faults(plan) == [
        "plan.json: pipelines: 128 of 4 + 63 of 8 make 1016 samples, 8 too few for the global "
        "batch of 1024; give micro_batches 130, 63"
    ]
    (fault,) = faults(replace(plan, pipelines=(*plan.pipelines[:1], Pipeline(1, second, 1024))))
    assert fault.endswith("with these sizes no numbers make the batch")
    bound = replace(job(), micro_batches=(1, 4))
    (fault,) = faults(fits, of=bound)
    assert "pipelines[1].micro_batch_size: is 8, which the job rules out" in fault


def test_a_size_that_does_not_divide_the_batch_may_be_beside_others() -> None:
    first, second = stages(A, [0, 26]), stages(B, [0, 26])
    assert faults(Plan(3, (Pipeline(340, first), Pipeline(1, second, 4)))) == []


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 9), st.integers(1, 20)),
        min_size=1,
        max_size=6,
    )
)
def test_samples_are_shared_out_exactly_where_that_can_be(pipelines) -> None:
    sizes, counts, weights = zip(*pipelines, strict=True)
    total = sum(map(mul, sizes, counts))
    found = share_samples(total, sizes, weights)
    assert found is not None
    assert min(found) >= 1
    assert sum(map(mul, sizes, found)) == total
    assert share_samples(sum(sizes) - 1, sizes, weights) is None
    if len(set(sizes)) == 1:
        # No pipeline has more than one micro batch too many, but for those that need one.
        wanted = [Fraction(sum(counts) * weight, sum(weights)) for weight in weights]
        few = sum(share < 1 for share in wanted)
        assert all(n <= share + 2 + few for n, share in zip(found, wanted, strict=True))


def test_samples_are_shared_out_in_proportion() -> None:
    assert share_samples(64, [8, 8, 1], [3, 3, 16]) == [3, 3, 16]
    assert share_samples(63, [8, 8, 1], [3, 3, 16]) == [3, 3, 15]
    assert share_samples(100, [10, 1], [1, 10]) == [5, 50]
    assert share_samples(7, [4, 4], [1, 1]) is None
    assert share_samples(11, [4, 3], [1, 1]) == [2, 1]
