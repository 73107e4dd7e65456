"""Plan files: shape, round trip, and checks against a job and a cluster."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.cluster import Cluster, Quota
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.problems import InputError
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_check import check_plan, split_in_proportion
from simulator.inputs.plan_file import complete_plan, load_plan, plan_text, plan_to_json, read_plan
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage, with_sizes

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SCHEMAS = resources.files("simulator") / "data/schemas"
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((SCHEMAS / "plan.schema.json").read_text(encoding="utf-8"))
)

A = Place("A100-40", "a2-highgpu-4g", "us-central1-a")
B = Place("A100-40", "A100-40x4", "us-central1-b")
W = Place("V100-16", "V100-16x8", "us-west1-a")

STAGE: dict[str, Any] = {
    "layers": [0, 26],
    "tp": 4,
    "gpu": "A100-40",
    "machine": "a2-highgpu-4g",
    "zone": "us-central1-a",
    "recompute": "full",
}
RAW: dict[str, Any] = {
    "micro_batch_size": 4,
    "pipelines": [{"micro_batches": 256, "stages": [STAGE]}],
}


@cache
def job() -> Job:
    return load_job(EXAMPLES / "opt-350m.toml")


@cache
def cluster() -> Cluster:
    return load_cluster(EXAMPLES / "three-zones.toml")


def stages(place: Place, cuts: list[int], *, tp: int = 4) -> tuple[Stage, ...]:
    return tuple(Stage(layers, tp, (place,)) for layers in pairwise(cuts))


def plan_of(*pipelines: tuple[Stage, ...], size: int = 1) -> Plan:
    """Return a plan whose pipelines split the job's batch as evenly as possible."""
    counts = split_in_proportion(job().global_batch // size, [1] * len(pipelines))
    return Plan(size, tuple(Pipeline(n, p) for n, p in zip(counts, pipelines, strict=True)))


def faults(plan: Plan, *, of: Job | None = None, on: Cluster | None = None) -> list[str]:
    found = check_plan(plan, of or job(), on or cluster(), place="plan.json")
    return [str(problem) for problem in found]


def with_stage(**values: Any) -> dict[str, Any]:
    """Return the small plan with keys of its stage changed, or removed by ``...``."""
    raw = copy.deepcopy(RAW)
    stage = {**STAGE, **values}
    raw["pipelines"][0]["stages"] = [{k: v for k, v in stage.items() if v is not ...}]
    return raw


def mistakes(raw: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_plan(raw, "plan.json")
    return [str(problem).removeprefix("plan.json: ") for problem in caught.value.problems]


# Shape


def test_example_plan_fits_its_job_and_cluster() -> None:
    plan = load_plan(EXAMPLES / "opt-350m-plan.json")
    assert faults(plan) == []
    assert len(plan.pipelines) == 4
    assert len({tuple(s.layers for s in p.stages) for p in plan.pipelines}) == 3
    assert len({p.micro_batches for p in plan.pipelines}) == 4
    assert {s.place.gpu for p in plan.pipelines for s in p.stages} == {"A100-40", "V100-16"}
    VALIDATOR.validate(plan_to_json(plan))
    assert plan_text(plan) == (EXAMPLES / "opt-350m-plan.json").read_text()


def test_plan_is_read_bare_or_under_the_key_plan() -> None:
    plan = Plan(4, (Pipeline(256, (Stage((0, 26), 4, (A,), "full"),)),))
    assert read_plan(RAW) == plan
    assert read_plan({"plan": RAW, "estimate": {"iteration_s": 1.0}}) == plan
    VALIDATOR.validate({"plan": RAW, "estimate": {}})
    with pytest.raises(InputError, match=r"plan.pipelines\[0\].micro_batches: is missing"):
        read_plan({"plan": {**RAW, "pipelines": [{"stages": [STAGE]}]}})


def test_omitted_keys_have_defaults() -> None:
    (stage,) = read_plan(with_stage(recompute=..., machine=...)).pipelines[0].stages
    assert stage == Stage((0, 26), 4, (Place("A100-40", "", "us-central1-a"),), "none", (1,))


def test_a_split_stage_has_a_place_per_share() -> None:
    here = {"gpu": "A100-40", "machine": "a2-highgpu-4g", "zone": "us-central1-a"}
    there = {"gpu": "V100-16", "machine": "V100-16x8", "zone": "us-west1-a"}
    raw = with_stage(split=[3, 1], places=[here, there], gpu=..., machine=..., zone=...)
    plan = read_plan(raw)
    assert plan.pipelines[0].stages[0] == Stage((0, 26), 4, (A, W), "full", (3, 1))
    assert faults(plan) == []
    assert read_plan(plan_to_json(plan)) == plan
    alike = read_plan(with_stage(split=[1, 1]))
    assert alike.pipelines[0].stages[0].places == (A, A)
    assert faults(replace(plan, micro_batch_size=2, pipelines=plan.pipelines * 2)) != []


def test_a_placed_stage_names_its_node_and_devices() -> None:
    plan = read_plan(with_stage(node="a-0", devices=[3, 2, 1, 0]))
    assert plan.pipelines[0].stages[0].place == replace(A, node="a-0", devices=(3, 2, 1, 0))
    assert read_plan(plan_to_json(plan)) == plan
    assert faults(plan) == []


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "is []; give an object"),
        ({}, "micro_batch_size: is missing; give a whole number from 1"),
        ({**RAW, "pipelines": []}, "pipelines: is an empty list; give at least one entry"),
        ({**RAW, "pipelines": [3]}, "pipelines[0]: is 3; give a table"),
        ({**RAW, "micro_batch_size": 1.5}, "micro_batch_size: is 1.5; give a whole number"),
        ({**RAW, "micro_batch_size": True}, "micro_batch_size: is true; give a whole number"),
        ({**RAW, "pipelins": []}, 'has an unknown key "pipelins"; did you mean "pipelines"?'),
        ({**RAW, "plan": RAW}, 'pipelines: is given together with "plan"'),
        ({**RAW, "virtual_stages": 2}, 'virtual_stages: is 2 with the schedule "1f1b"'),
        ({**RAW, "schedule": "2f2b"}, 'schedule: is "2f2b"; give "1f1b"'),
        (with_stage(layers=[3, 3]), "layers: is [3, 3], an empty range; give [first, end]"),
        (with_stage(layers=[0]), "layers: is [0]; give [first, end]"),
        (with_stage(layers=[-1, 4]), "layers: is [-1, 4]; give [first, end]"),
        (with_stage(layers=[0, 1.5]), "layers: is [0, 1.5]; give [first, end]"),
        (with_stage(tp=0), "tp: is 0; give a whole number"),
        (with_stage(gpu=...), "gpu: is missing; give a text"),
        (with_stage(zone=""), 'zone: is ""; give a text'),
        (with_stage(recompute="some"), 'is "some"; give "none", "full", or how many of the first'),
        (with_stage(recompute=0), 'is 0; give "none", "full", or how many of the first layers'),
        (with_stage(recompute=True), 'is true; give "none", "full", or how many of the first'),
        (with_stage(recompute=26), "is 26, but the stage has 26 layers; give a smaller number"),
        (with_stage(split=[1, 0]), "split[1]: is 0; give a positive whole number"),
        (with_stage(split=[]), "split: is an empty list"),
        (
            with_stage(places=[{"gpu": "T4", "zone": "local"}]),
            'gpu: is given together with "places"',
        ),
        (
            with_stage(gpu=..., machine=..., zone=..., split=[1, 1], places=[{"gpu": "T4"}]),
            "places: has 1 entries for 2 shares",
        ),
        (with_stage(devices=[0, 1, 2, 3]), 'devices: is given without "node"'),
        (with_stage(node="a", devices=[0, 0, 1, 2]), "devices: is [0, 0, 1, 2]; name each"),
        (with_stage(node="a", devices=[-1]), "devices[0]: is -1; give a whole number, 0 or more"),
        (with_stage(pt=3), 'has an unknown key "pt"'),
    ],
)
def test_invalid_shape_is_rejected(raw: Any, said: str) -> None:
    assert said in "\n".join(mistakes(raw))
    assert not VALIDATOR.is_valid(raw) or "an empty range" in said or "but the stage has" in said


def test_all_mistakes_are_reported_at_once() -> None:
    raw = {
        "micro_batch_size": 0,
        "pipelines": [
            {"micro_batches": 3, "stages": [STAGE, {**STAGE, "tp": "4", "layers": None}]},
            {"micro_batches": -3, "stages": []},
        ],
    }
    assert mistakes(raw) == [
        "micro_batch_size: is 0; give a whole number from 1 to 1048576",
        "pipelines[0].stages[1].layers: is null; "
        "give [first, end] where end is the layer after the last",
        'pipelines[0].stages[1].tp: is "4"; give a whole number from 1 to 1048576',
        "pipelines[1].micro_batches: is -3; give a whole number from 1 to 1099511627776",
        "pipelines[1].stages: is an empty list; give at least one entry",
    ]


# Fit


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ([1, 26], "stages[0].layers: [1, 26) leaves out layer 0 before the first stage"),
        ([0, 25], "stages[0].layers: [0, 25) leaves out layer 25 at the end; end at 26"),
        ([0, 26, 27], "stages[1].layers: [26, 27) is beyond the last layer of opt-350m; leave"),
        ([0, 13, 28], "stages[1].layers: [13, 28) ends beyond the last layer of opt-350m"),
    ],
)
def test_layers_that_do_not_cover_the_model_are_reported(cuts: list[int], said: str) -> None:
    (fault,) = faults(plan_of(stages(A, cuts)))
    assert said in fault
    assert fault.endswith("the layers of a pipeline must cover [0, 26) without gap or overlap")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            (15, 26),
            "[15, 26) leaves out layers 13 to 14 between the stage before and this one; start",
        ),
        ((12, 26), "[12, 26) repeats layer 12; start at 13"),
    ],
)
def test_a_gap_and_an_overlap_are_named(second: tuple[int, int], said: str) -> None:
    first, last = stages(A, [0, 13, 26])
    (fault,) = faults(plan_of((first, replace(last, layers=second))))
    assert fault.startswith(f"plan.json: pipelines[0].stages[1].layers: {said}")


def test_tp_degree_must_divide_be_allowed_and_fit_a_machine() -> None:
    (fault,) = faults(plan_of(stages(A, [0, 13, 26], tp=3)))
    assert fault == (
        "plan.json: pipelines[0].stages[0].tp: TP 3 does not divide the 16 attention heads of "
        "opt-350m (and so in 1 more stage); possible TP degrees: 1, 2, 4, 8, 16"
    )
    (fault,) = faults(plan_of(stages(W, [0, 26], tp=8)))
    assert fault.endswith(
        "8 is more than the job's largest TP degree of 4; "
        "set training.max_tp = 8 in the job, or lower tp"
    )
    (fault,) = faults(plan_of(stages(A, [0, 26], tp=8)), of=replace(job(), max_tp=8))
    assert "8 is more than the 4 GPUs of a machine (a2-highgpu-4g)" in fault
    assert faults(plan_of(stages(W, [0, 26], tp=8)), of=replace(job(), max_tp=8)) == []


def test_unknown_place_gets_a_suggestion() -> None:
    (fault,) = faults(plan_of(stages(replace(A, zone="us-central1-d"), [0, 26])))
    assert 'stages[0].zone: the cluster has no pool in zone "us-central1-d"; did you' in fault
    (fault,) = faults(plan_of(stages(replace(A, gpu="A100-41"), [0, 26])))
    assert 'stages[0].gpu: no GPU "A100-41" is known; did you mean "A100-40"' in fault
    (fault,) = faults(plan_of(stages(replace(A, gpu="T4"), [0, 26])))
    assert 'has no pool of "T4" in zone us-central1-a; choose from A100-40' in fault
    (fault,) = faults(plan_of(stages(replace(A, machine="a2"), [0, 26])))
    assert 'stages[0].machine: the cluster has no "a2"' in fault
    assert 'choose from "a2-highgpu-4g"' in fault


def test_machine_is_filled_in_if_unambiguous() -> None:
    plan = plan_of(stages(replace(A, gpu="A100-40GB", machine=""), [0, 26]))
    assert complete_plan(plan, cluster()) == plan_of(stages(A, [0, 26]))
    assert faults(plan) == []
    other = replace(cluster().pools[0], machine="a2-highgpu-8g", gpus_per_machine=8)
    two = replace(cluster(), pools=(*cluster().pools, other))
    (fault,) = faults(plan, on=two)
    assert "machine: is missing, and several machine types have A100-40" in fault
    assert 'give one of "a2-highgpu-4g", "a2-highgpu-8g"' in fault


def test_missing_gpus_are_reported_with_their_number() -> None:
    assert faults(plan_of(*[stages(A, [0, 26])] * 6)) == []  # 16 up and 8 to be had
    (fault,) = faults(plan_of(*[stages(A, [0, 26])] * 7))
    assert fault.startswith(
        "plan.json: takes 28 A100-40 GPUs of a2-highgpu-4g in us-central1-a, "
        "where 16 are up and 8 are obtainable: 4 too many"
    )


def test_spot_and_on_demand_of_one_machine_type_count_together() -> None:
    spot = replace(cluster().pools[0], spot=True, gpus=4, obtainable_gpus=0)
    both = replace(cluster(), pools=(*cluster().pools, spot))
    assert faults(plan_of(*[stages(A, [0, 26])] * 7), on=both) == []


def test_group_does_not_span_machines() -> None:
    pool = replace(cluster().pools[1], gpus=7)  # a machine of four and one of three
    small = replace(cluster(), pools=(pool,))
    assert faults(plan_of(stages(B, [0, 26]), stages(B, [0, 26], tp=2)), on=small) == []
    pool = replace(pool, gpus=11, gpus_per_machine=8)  # eight and three
    small = replace(cluster(), pools=(pool,))
    assert faults(plan_of(*[stages(B, [0, 26])] * 2), on=small) == []
    pool = replace(pool, gpus=11, gpus_per_machine=3)
    small = replace(cluster(), pools=(pool,))
    (fault,) = faults(plan_of(*[stages(B, [0, 26], tp=2)] * 5), on=small)
    assert "puts 5 groups of 2 or more GPUs on A100-40x4" in fault
    assert "whose machines hold 4" in fault


def test_a_quota_of_a_region_counts_its_zones_together() -> None:
    bound = replace(cluster(), quotas=(Quota("us-central1", "A100-40", 10),))
    plan = plan_of(stages(A, [0, 13, 26]), stages(B, [0, 26]))
    (fault,) = faults(plan, on=bound)
    assert "takes 12 A100-40 GPUs in us-central1, 2 more than the quota" in fault
    assert faults(plan, on=replace(cluster(), quotas=(Quota("us-west1", "V100-16", 0),))) == []


def test_wrong_batch_is_reported_with_micro_batches_that_meet_it() -> None:
    first, second = stages(A, [0, 26]), stages(B, [0, 26])
    plan = Plan(4, (Pipeline(200, first), Pipeline(60, second)))
    assert faults(plan) == [
        "plan.json: pipelines: 200 + 60 = 260 micro batches of 4 make 1040 samples, "
        "16 too many for the global batch of 1024; give micro_batches 197, 59"
    ]
    fits = Plan(4, (Pipeline(197, first), Pipeline(59, second)))
    assert faults(fits) == []
    (fault,) = faults(replace(fits, micro_batch_size=3))
    assert fault.startswith(
        "plan.json: micro_batch_size: 3 does not divide the global batch of 1024; "
        "those that do are 1, 2, 4, 8"
    )
    (fault,) = faults(Plan(1024, fits.pipelines))
    assert fault.endswith("1 micro batches feed at most 1 of the 2 pipelines")


def test_micro_batch_size_excluded_by_the_job_is_reported() -> None:
    bound = replace(job(), micro_batches=(1, 2))
    (fault,) = faults(plan_of(stages(A, [0, 26]), size=4), of=bound)
    assert "micro_batch_size: is 4, which the job rules out; give one of 1, 2" in fault


def test_more_recomputation_than_required_is_allowed_and_less_is_not() -> None:
    plan = plan_of(stages(A, [0, 26]))
    (stage,) = plan.pipelines[0].stages
    full = plan_of((replace(stage, recompute="full"),))
    assert faults(full) == []
    strict = replace(job(), recompute="full")
    assert faults(full, of=strict) == []
    (fault,) = faults(plan, of=strict)
    assert 'recompute: is "none", but the job requires "full"' in fault
    some = plan_of((replace(stage, recompute=25),))
    assert faults(some) == []
    (fault,) = faults(some, of=strict)
    assert 'recompute: is 25, but the job requires "full"' in fault


def test_shares_must_be_whole_samples() -> None:
    split = Stage((0, 26), 4, (A, B), split=(2, 1))
    (fault,) = faults(plan_of((split,), size=4))
    assert "split: [2, 1] does not divide micro batches of 4 into whole samples" in fault
    assert faults(plan_of((replace(split, split=(3, 1)),), size=4)) == []


def test_interleaved_chunks_share_their_group_s_place() -> None:
    chunks = stages(A, [0, 7, 13, 20, 26])
    plan = replace(plan_of(chunks), schedule="interleaved", virtual_stages=2)
    assert faults(plan) == []
    assert plan.device_count == 8
    odd = replace(plan, pipelines=(Pipeline(1024, stages(A, [0, 7, 26])),), virtual_stages=2)
    assert faults(odd) == []
    odd = replace(odd, pipelines=(Pipeline(1024, stages(A, [0, 7, 13, 26])),))
    (fault,) = faults(odd)
    assert "pipelines[0].stages: has 3 stages, not a multiple of 2 virtual stages" in fault
    apart = (*chunks[:3], replace(chunks[3], places=(B,)))
    (fault,) = faults(replace(plan, pipelines=(Pipeline(1024, apart),)))
    assert "stages[3]: shares a device group with stages[1], whose place differs" in fault
    uneven = (Pipeline(511, chunks), Pipeline(513, stages(B, [0, 7, 13, 20, 26])))
    assert [fault.partition(";")[0] for fault in faults(replace(plan, pipelines=uneven))] == [
        "plan.json: pipelines[0].micro_batches: 511 is not a multiple of the 2 device groups",
        "plan.json: pipelines[1].micro_batches: 513 is not a multiple of the 2 device groups",
    ]


def test_no_device_serves_two_groups() -> None:
    def placed(*devices: int) -> tuple[Stage, ...]:
        return stages(replace(A, node="n0", devices=devices), [0, 26], tp=2)

    assert faults(plan_of(placed(0, 1), placed(2, 3))) == []
    (fault,) = faults(plan_of(placed(0, 1), placed(1, 2)))
    assert "pipelines[1].stages[0].devices: takes device 1 of n0, which pipelines[0]" in fault
    (fault,) = faults(plan_of(placed(0)))
    assert "devices: names 1 devices for tp 2" in fault
    (fault,) = faults(plan_of(placed(3, 4)))
    assert "devices: names device 4, and a machine here has 4; count from 0 to 3" in fault


def test_problem_of_many_stages_is_reported_once() -> None:
    many = plan_of(*[stages(replace(A, zone="nowhere"), list(range(26)), tp=1)] * 40)
    last, lost = faults(many)
    assert "stages[24].layers: [24, 25) leaves out layer 25 at the end (and so in 39 more" in last
    assert "(and so in 999 more stages)" in lost


PLACES = st.builds(
    Place,
    gpu=st.sampled_from(["A100-40", "T4", "x"]),
    machine=st.sampled_from(["", "a2-highgpu-4g"]),
    zone=st.sampled_from(["us-central1-a", "é"]),
)
RUNS = st.tuples(st.integers(1, 99), st.sampled_from([None, None, 2, 3]))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    def stage() -> Stage:
        first = draw(st.integers(0, 30))
        split = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        layers = draw(st.integers(1, 30))
        return Stage(
            (first, first + layers),
            draw(st.integers(1, 9)),
            tuple(draw(PLACES) for _ in split),
            draw(st.sampled_from(["none", "full", *range(1, layers)])),
            split,
        )

    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]))
    pipelines = tuple(
        Pipeline(count, tuple(stage() for _ in range(draw(st.integers(1, 3)))), own)
        for count, own in draw(st.lists(RUNS, min_size=1, max_size=3))
    )
    virtual = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    together, zero = draw(st.sampled_from([None, 1, 2])), draw(st.sampled_from([None, 0, 1]))
    size, shares = draw(st.integers(1, 8)), draw(st.booleans())
    outer = draw(st.sampled_from([None, 1, 500]))
    return Plan(size, pipelines, schedule, virtual, together, shares, zero, outer)


@given(plans())
def test_written_plan_is_read_back_and_fits_the_schema(plan: Plan) -> None:
    raw = plan_to_json(plan)
    VALIDATOR.validate(raw)
    assert read_plan(raw) == with_sizes(plan, plan.size_by_pipeline)
    assert json.loads(plan_text(plan)) == raw


@pytest.mark.chaos
@given(plans())
def test_any_plan_can_be_checked(plan: Plan) -> None:
    for fault in check_plan(plan, job(), cluster()):
        assert fault.place.startswith("plan")
        assert fault.what
        str(fault).encode()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 30),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.sampled_from(["none", "interleaved", "A100-40"]),
    st.lists(st.integers(-1, 30), max_size=3),
    st.lists(st.just(STAGE), max_size=2),
    st.dictionaries(st.sampled_from(["gpu", "zone"]), st.text(max_size=3), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a plan with one to three values replaced or removed."""
    raw = json.loads((EXAMPLES / "opt-350m-plan.json").read_text())
    for _ in range(draw(st.integers(1, 3))):
        inner: Any = raw
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            deeper = inner[key]
            if isinstance(deeper, dict | list) and draw(st.integers(0, 4)):
                inner = deeper
                continue
            if draw(st.booleans()):
                del inner[key]
            else:
                inner[key] = copy.deepcopy(draw(VALUES))
            if isinstance(inner, dict) and draw(st.integers(0, 4)) == 0:
                extra = draw(st.sampled_from(["split", "places", "plan", "node", "x"]))
                inner[extra] = copy.deepcopy(draw(VALUES))
            break
    return raw


@pytest.mark.chaos
@given(damaged())
def test_damaged_plan_is_read_or_rejected(raw: dict[str, Any]) -> None:
    try:
        plan = read_plan(raw)
    except InputError as error:
        str(error).encode()
    else:
        VALIDATOR.validate(raw)
        check_plan(plan, job(), cluster())
