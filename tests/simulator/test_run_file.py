"""Measured runs in the project's own keys, and how well predictions order them."""

from __future__ import annotations

import copy
import json
import random
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from simulator.api import Measurements
from simulator.documents.files import Document, load_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.run_file import read_run
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.validate_runs import (
    Comparison,
    ValidationReport,
    order_figures,
    rank_correlation,
    validate,
)
from tests.simulator.worlds import cases

FORMATS = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
CATALOGUE = load_catalogue()
STAGE = {"gpu": "A100-80", "machine": "a2-ultragpu-8g", "zone": "us-central1-a", "tp": 4}
RUN: dict[str, Any] = {
    "id": "one",
    "source": "here",
    "job": {
        "model": {"family": "gpt2", "layers": 4, "hidden": 4096, "heads": 32, "vocab": 50257},
        "training": {
            "global_batch": 16,
            "sequence": 1024,
            "precision": "fp16",
            "max_tp": 4,
            "flash_attention": False,
            "dropout": 0.1,
            "runtime": "megatron-deepspeed",
        },
    },
    "cluster": {"pool": [{key: STAGE[key] for key in ("zone", "gpu", "machine")} | {"gpus": 16}]},
    "plan": {
        "micro_batch_size": 2,
        "pipelines": [
            {
                "micro_batches": 4,
                "stages": [STAGE | {"layers": [0, 3]}, STAGE | {"layers": [3, 6]}],
            }
        ]
        * 2,
    },
    "measured": {"iteration_s": 0.5, "peak_memory_bytes": 8e9},
}


def changed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(RUN) | changes


def report_of(*runs: dict[str, Any]) -> ValidationReport:
    return validate(
        Document("runs.json", {"runs": list(runs)}),
        measurements=Measurements(),
        catalogue=CATALOGUE,
    )


def test_a_run_is_read_predicted_and_reported() -> None:
    report = report_of(RUN, changed(id="two", measured={"iteration_s": 0.6}))
    assert report.failures == ()
    found = report.to_json()
    one, two = found["runs"]
    assert (one["id"], one["measured_s"], two["measured_s"]) == ("one", 0.5, 0.6)
    assert one["predicted_s"] == two["predicted_s"] > 0
    assert one["error_bar"] > 0.1
    here = found["sources"]["here"]
    errors = [100 * (one["predicted_s"] / measured - 1) for measured in (0.5, 0.6)]
    assert here["n"] == 2
    assert here["bias_pct"] == pytest.approx(sum(errors) / 2)
    assert here["mean_abs_pct"] == pytest.approx(sum(map(abs, errors)) / 2)
    assert found["memory"]["cases"][0]["measured"] == 8e9


def test_facts_of_a_run_change_its_prediction() -> None:
    usual = report_of(RUN).comparisons[0]
    sent = {"gradient_allreduce_bytes": 4}
    plain, fused = (
        report_of(changed(facts=sent | more)).comparisons[0] for more in ({}, {"softmax": "fused"})
    )
    # More bytes of gradients, and without a word about it the softmax of their time.
    assert usual.time_predicted_s < fused.time_predicted_s < plain.time_predicted_s
    assert any("taken for Megatron-LM 1.1.5's" in note for note in plain.notes)
    assert not any("Megatron-LM" in note for note in fused.notes)
    odd = report_of(changed(facts={"colour": "red"})).comparisons[0]
    assert "facts: colour is not used" in odd.notes
    assert odd.time_predicted_s == usual.time_predicted_s


def test_the_order_of_ranks_decides_which_machine_a_stage_is_on() -> None:
    def nodes(order: str) -> list[list[str | None]]:
        run = read_run(changed(facts={"rank_order": order}), "run", Path(), CATALOGUE)
        return [[stage.place.node for stage in pipe.stages] for pipe in run.plan.pipelines]

    assert nodes("tp, dp, pp (innermost first), nodes in hostfile order") == [[None, None]] * 2
    first, second = "a2-ultragpu-8g 0", "a2-ultragpu-8g 1"
    assert nodes("tp, pp, dp") == [[first, first], [second, second]]


def test_the_nodes_of_a_plan_go_before_the_order_of_ranks() -> None:
    plan = copy.deepcopy(RUN["plan"])
    plan["pipelines"] = [
        {"micro_batches": 4, "stages": [{**s, "node": f"{s['layers'][0]}"} for s in p["stages"]]}
        for p in plan["pipelines"]
    ]
    run = changed(plan=plan, facts={"rank_order": "tp, pp, dp"})
    found = read_run(run, "run", Path(), CATALOGUE).plan.pipelines
    assert [[stage.place.node for stage in pipe.stages] for pipe in found] == [["0", "3"]] * 2


def test_tp_groups_of_ranks_far_apart_are_told_to_count_as_neighbours() -> None:
    for order, is_told in (("dp, tp, pp", True), ("tp, pp, dp", False)):
        run = read_run(changed(facts={"rank_order": order}), "run", Path(), CATALOGUE)
        assert any("neighbours" in note for note in run.notes) == is_told


def test_facts_of_other_runtimes_are_not_used_of_sailors_own() -> None:
    training = {**RUN["job"]["training"], "runtime": "sailor"}
    job = {**RUN["job"], "training": training}
    ours = report_of(changed(job=job, facts={"gradient_allreduce_bytes": 4}))
    assert ours.failures == ()
    (found,) = ours.comparisons
    assert any("gradient_allreduce_bytes is not used" in note for note in found.notes)


def test_gradients_of_fp32_jobs_tell_nothing_of_the_softmax() -> None:
    training = {**RUN["job"]["training"], "precision": "fp32"}
    run = changed(job={**RUN["job"], "training": training}, facts={"gradient_allreduce_bytes": 4})
    (found,) = report_of(run).comparisons
    assert not any("softmax" in note for note in found.notes)


def test_the_chunks_of_a_device_group_are_on_one_machine() -> None:
    ranges = [[0, 2], [2, 3], [3, 4], [4, 6]]
    pipeline = {"micro_batches": 4, "stages": [STAGE | {"layers": layers} for layers in ranges]}
    plan = {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 2}
    run = changed(plan=plan | {"pipelines": [pipeline] * 2}, facts={"rank_order": "tp, pp, dp"})
    pipelines = read_run(run, "run", Path(), CATALOGUE).plan.pipelines
    found = [[stage.place.node for stage in pipe.stages] for pipe in pipelines]
    assert found == [["a2-ultragpu-8g 0"] * 4, ["a2-ultragpu-8g 1"] * 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured": {"iteration_s": -1}}, "measured.iteration_s"),
        ({"measured": None}, "measured"),
        ({"plan": None}, "plan"),
        ({"facts": {"rank_order": "dp, dp"}}, "rank_order"),
        ({"job": RUN["job"] | {"training": {"sequence": 8}}}, "global_batch"),
        ({"job": RUN["job"] | {"training": 5}}, "training"),
        ({"job": RUN["job"] | {"training": "ab"}}, "training"),
        ({"facts": 5}, "facts: is 5"),
        ({"facts": "abc"}, 'facts: is "abc"'),
        ({"measured": {"iteration_seconds": 0.5}}, 'unknown key "iteration_seconds"'),
        ({"measured": {"time": 0.5}}, 'unknown key "time"'),
        ({"measured": {"iteration_s": 0.5, "peak_memory": 1}}, 'write "peak_memory_bytes"'),
        ({"fact": {}}, 'unknown key "fact"; write "facts"'),
        (
            {"facts": {"rank_order": "tp, pp, dp"}}
            | {"cluster": {"pool": [RUN["cluster"]["pool"][0] | {"zone": "us-central1-b"}]}},
            "plan: pipelines[0].stages[0]",
        ),
    ],
)
def test_mistakes_are_reported_with_their_place(changes: dict[str, Any], said: str) -> None:
    report = report_of(changed(**changes), RUN)
    assert len(report.comparisons) == 1
    ((name, reason),) = report.failures
    assert name == "one"
    assert "runs.json: runs[0]" in reason
    assert said in reason


def test_a_run_without_a_measurement_is_named() -> None:
    report = report_of(changed(id="none", measured={}), RUN)
    assert report.unmeasured == ("none",)
    assert [c.case for c in report.comparisons] == ["one"]
    assert report.to_json()["unmeasured"] == ["none"]


def test_unknown_keys_are_noted_and_not_used() -> None:
    """Authors add what they know; only a misspelling of a missing key is an error."""
    known = {"iteration_s": 0.5, "iteration_std_s": 0.1}
    report = report_of(changed(weather="fair", provenance={"file": "a.csv"}, measured=known))
    assert report.failures == ()
    told = [("one", "measured: iteration_std_s is not used"), ("one", "weather is not used")]
    assert list(report.notes) == told
    assert report.to_json()["notes"] == [{"id": name, "note": note} for name, note in told]


def test_runs_inside_their_error_bars_are_counted() -> None:
    predicted = report_of(RUN).comparisons[0].time_predicted_s
    runs = [changed(measured={"iteration_s": predicted * factor}) for factor in (1.0, 1.01, 3.0)]
    found = report_of(*runs).to_json()
    assert [run["inside_error_bar"] for run in found["runs"]] == [True, True, False]
    assert found["sources"]["here"]["inside_error_bars"] == pytest.approx(2 / 3)


def test_a_file_has_runs_or_cases() -> None:
    for data in ({}, {"runs": []}, {"runs": [RUN], "cases": [RUN]}):
        with pytest.raises(InputError, match="must be a list of measured runs"):
            validate(Document("f", data), measurements=Measurements(), catalogue=CATALOGUE)


def test_schema_and_documentation_describe_runs() -> None:
    text = resources.files("simulator").joinpath("data/schemas/runs.schema.json").read_text("utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    section = FORMATS.partition("\n## Measured runs\n")[2]
    shown = json.loads(section.partition("```json\n")[2].partition("```")[0])
    for document in ({"runs": [RUN]}, shown):
        validator.validate(document)
    assert report_of(*shown["runs"]).failures == ()
    for key in json.loads(text)["properties"]["runs"]["items"]["properties"]:
        assert f"`{key}`" in section, key


# -- figures ---------------------------------------------------------------------------------------


def compared(group: object, measured: float | None, predicted: float) -> Comparison:
    plan = Plan(1, (Pipeline(1, (Stage((0, 1), 1, (Place("T4", "m", "z"),)),)),))
    return Comparison("", "", group, measured, predicted, None, 0.0, 0.1, "", (), plan)


def test_order_figures_by_hand() -> None:
    runs = [compared("a", m, p) for m, p in ((1.0, 1.2), (2.0, 1.1), (3.0, 4.0))]
    runs += [compared("b", 5.0, 1.0), compared("b", 4.0, 2.0), compared("c", 1.0, 9.0)]
    runs.append(compared("a", None, 0.1))
    found = order_figures(runs)
    # Group a: ranks 1 2 3 against 2 1 3; b has two runs; c has one, and says nothing.
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert found["pairs_right"] == pytest.approx(2 / 4)
    # All four are further apart than 2 %.
    assert (found["pairs_apart"], found["apart_right"]) == (1.0, pytest.approx(2 / 4))
    assert found["tied_right"] is None
    assert found["regret_mean"] == pytest.approx((2.0 / 1.0 + 5.0 / 4.0) / 2)
    assert found["regret_max"] == 2.0
    assert set(order_figures([]).values()) == {None}


def test_rank_correlation_agrees_with_its_definition(examples: int) -> None:
    for seed in cases("ranks", examples):
        rng = random.Random(seed)
        one = [rng.randint(0, 8) for _ in range(rng.randint(2, 12))]
        other = [rng.randint(0, 8) for _ in one]

        def ranks(values: list[int]) -> list[float]:
            return [
                sum(x < value for x in values) + (sum(x == value for x in values) + 1) / 2
                for value in values
            ]

        pairs = list(combinations(range(len(one)), 2))
        a, b = ranks(one), ranks(other)
        top = sum((a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs)
        under = [sum((r[i] - r[j]) ** 2 for i, j in pairs) for r in (a, b)]
        wanted = top / (under[0] * under[1]) ** 0.5 if all(under) else 0.0
        assert rank_correlation(one, other) == pytest.approx(wanted, abs=1e-12), seed


def test_published_runs_of_other_systems(reference: Path) -> None:
    """The figures of docs/accuracy.md."""
    facts = load_catalogue(reference / "public_runs_catalogue.toml")
    report = validate(
        load_document(reference / "public_runs.json"), measurements=Measurements(), catalogue=facts
    )
    assert report.failures == ()
    found = report.to_json()
    sources = found["sources"]
    assert sources["vtrain-multi"]["mean_abs_pct"] < 6.1
    assert sources["amp-homogeneous"]["mean_abs_pct"] < 4.2
    assert sources["amp-homogeneous"]["rank_correlation"] > 0.98
    assert sources["amp-homogeneous"]["regret_max"] == 1.0
    assert sources["vtrain-multi"]["regret_max"] < 1.05
    # Plans that can be told apart are ordered as measured, others hardly better than by chance.
    t4, a100 = sources["amp-homogeneous"], sources["vtrain-multi"]
    assert t4["apart_right"] > 0.97
    assert a100["apart_right"] > 0.8
    assert t4["tied_right"] < 0.8
    assert a100["tied_right"] < 0.6
    inside = [
        abs(run["predicted_s"] / run["measured_s"] - 1) <= run["error_bar"] for run in found["runs"]
    ]
    assert sum(inside) >= 0.9 * len(inside)
