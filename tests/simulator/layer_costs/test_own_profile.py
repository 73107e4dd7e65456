"""Profiles that Sailor measured: read, merged, and used with their spread as the error bar."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.problem.question import read_ahead
from simulator.api import load_measurements, network_of
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import cluster_from_document
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.profile import Profile, profile_name
from simulator.layer_costs.profile_file import profile_to_json, read_profile
from simulator.models.families import build_model
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job

MODEL = build_model("gpt2", layers=1, hidden=16, heads=4, vocab=64, sequence=8)
JOB = Job("job", MODEL, global_batch=8, sequence=8, precision="fp32", max_tp=2)
OWN: dict[str, Any] = {
    "sailor_profile": 1,
    "model": "tiny",
    "sequence": 8,
    "precision": "fp32",
    "flash_attention": True,
    "layers": ["embedding", "block 1", "head"],
    "sizes": [
        {
            "tp": 1,
            "parameters": [layer.parameters() for layer in MODEL.layers],
            "output_elements": [4, 4, 1],
            "kept_elements": [4, 40, 9],
        }
    ],
    "timings": [
        {
            "gpu": "A100-40",
            "tp": tp,
            "micro_batch": size,
            "forward_s": [0.1, 0.2 * size, 0.3],
            "backward_s": [0.0, 0.4, 0.6],
            "optimizer_s": 0.01,
            "kept_bytes": [10.0 * size, 100.0 * size, 5.0],
            "transient_bytes": [1.0, 50.0 * size, 9.0],
            "collectives": "inside" if tp == 1 else "apart",
            "measured": {
                "device": "NVIDIA A100",
                "date": "2026-01-02",
                "samples": 9,
                "spread": 0.04,
            },
        }
        for tp, size in ((1, 1), (1, 2), (2, 1))
    ],
    "did_not_fit": [{"gpu": "A100-40", "tp": 1, "micro_batch": 4}],
}


def read(data: dict[str, Any]) -> Profile:
    document = parse_document(json.dumps(data).encode(), name="profiles_tiny.json")
    return read_profile(document, catalogue=load_catalogue())


def changed(**more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(OWN), **more}


def costs_of(profile: Profile | None, job: Job = JOB) -> LayerCosts:
    text = b'[[pool]]\nzone = "us-central1-a"\ngpu = "A100-40"\ngpus_per_machine = 4\ngpus = 4\n'
    cluster: Cluster = cluster_from_document(parse_document(text, name="cluster.toml"))
    network = network_of(cluster, MeasuredNetwork())
    return LayerCosts(job, profile=profile, catalogue=cluster.catalogue, network=network)


def test_profile_is_equal_after_writing_and_reading() -> None:
    once = profile_to_json(read(OWN))
    assert once["did_not_fit"] == OWN["did_not_fit"]
    assert once["timings"][0]["measured"] == OWN["timings"][0]["measured"]
    assert once["timings"][2]["collectives"] == "apart"
    assert profile_to_json(read(once)) == once


def test_mistakes_in_a_measurement_are_reported_with_their_places() -> None:
    broken = changed()
    broken["timings"][0]["measured"]["spread"] = -1
    broken["timings"][1]["kept_bytes"] = [1]
    broken["did_not_fit"][0]["gpu"] = "Z9"
    with pytest.raises(InputError) as caught:
        read(broken)
    assert [problem.place for problem in caught.value.problems] == [
        "profiles_tiny.json: timings[0].measured.spread",
        "profiles_tiny.json: timings[1].kept_bytes",
        "profiles_tiny.json: did_not_fit[0].gpu",
    ]


# -- merging ---------------------------------------------------------------------------------------


def test_other_kinds_are_added_and_the_same_are_replaced() -> None:
    newer = changed(did_not_fit=[])
    newer.pop("did_not_fit")
    newer["timings"] = [copy.deepcopy(OWN["timings"][0]) for _ in range(2)]
    newer["timings"][0]["forward_s"] = [9.0, 9.0, 9.0]
    newer["timings"][1]["gpu"] = "V100-16"
    both = read(OWN).merged_with(read(newer), place="file")
    assert both.gpus() == ["A100-40", "V100-16"]
    assert both.micro_batches("A100-40", 1) == [1, 2]
    assert both.timings["A100-40", 1, 1].forward_s.tolist() == [9.0, 9.0, 9.0]
    assert both.timings["A100-40", 1, 2].forward_s.tolist() == [0.1, 0.4, 0.3]
    assert both.did_not_fit == {("A100-40", 1, 4)}


def test_timings_of_another_model_are_not_merged() -> None:
    older, newer = (changed(fingerprint=each) for each in ("older", "newer"))
    with pytest.raises(InputError) as caught:
        read(older).merged_with(read(newer), place="file")
    (problem,) = caught.value.problems
    assert "another model" in problem.what
    assert "remove the file" in problem.cure
    assert read(changed()).merged_with(read(newer), place="file").fingerprint == "newer"


def test_an_optimizer_step_of_no_parameters_counts_as_not_measured() -> None:
    frozen = copy.deepcopy(OWN)
    frozen["sizes"][0]["parameters"] = [0, 0, 0]
    times = costs_of(read(frozen)).times("A100-40", tp=1, samples=1)
    assert times.optimizer_s_per_parameter > 0
    assert any("optimizer step computed" in note for note in times.provenance.notes)


def test_an_optimizer_step_that_did_not_fit_leaves_what_was_measured() -> None:
    older = read(changed())
    newer = replace(read(changed()), optimizer_parameters={})
    both = older.merged_with(newer, place="file")
    assert both.optimizer_parameters == older.optimizer_parameters
    assert both.optimizer_parameters[1] > 1


def test_what_fits_now_is_not_remembered_as_too_large() -> None:
    newer = changed()
    newer["timings"] = [OWN["timings"][0] | {"micro_batch": 4}]
    newer.pop("did_not_fit")
    both = read(OWN).merged_with(read(newer), place="file")
    assert both.did_not_fit == frozenset()


def test_another_model_is_not_merged_with() -> None:
    newer = read(changed(sequence=16, precision="bf16", layers=["embedding", "other", "head"]))
    with pytest.raises(InputError) as caught:
        read(OWN).merged_with(newer, place="file")
    whats = [problem.what for problem in caught.value.problems]
    assert whats == [
        "was measured with sequence 8, and the job has 16",
        "was measured with precision fp32, and the job has bf16",
        "was measured on other layers than the job's",
    ]


def test_published_measurements_are_not_merged_with() -> None:
    published = changed()
    for timing in published["timings"]:
        timing.pop("measured")
    with pytest.raises(InputError, match="was not measured by sailorctl profile"):
        read(published).merged_with(read(OWN), place="file")


# -- what the simulator makes of it ----------------------------------------------------------------


def test_the_spread_is_the_error_bar() -> None:
    times = costs_of(read(OWN)).times("A100-40", tp=1, samples=2)
    assert times.provenance.source == "measured"
    assert times.provenance.relative_error == 0.04
    assert times.forward.tolist() == [0.1, 0.4, 0.3]


def test_an_error_bar_has_a_lower_limit_however_small_the_spread() -> None:
    steady = changed()
    for timing in steady["timings"]:
        timing["measured"]["spread"] = 0.0
    times = costs_of(read(steady)).times("A100-40", tp=1, samples=1)
    assert times.provenance.relative_error == 0.02


def test_all_reduces_are_added_to_what_was_measured_apart_from_them() -> None:
    profile = read(OWN)
    times = costs_of(profile).times("A100-40", tp=2, samples=1)
    added = times.forward - profile.timings["A100-40", 2, 1].forward_s
    assert (added[1:2] > 0).all()
    assert any("all-reduces computed" in note for note in times.provenance.notes)
    inside = changed()
    inside["timings"][2]["collectives"] = "inside"
    assert costs_of(read(inside)).times("A100-40", tp=2, samples=1).forward[1] == 0.2


def test_measured_bytes_are_used_and_lie_on_a_line() -> None:
    costs = costs_of(read(OWN))
    kept = costs.kept_bytes(tp=1, samples=3, recompute="none")
    assert kept.tolist() == [30.0, 300.0, 5.0]
    assert costs.workspace_bytes(tp=1, samples=3, recompute="none").tolist() == [1.0, 150.0, 9.0]
    # Recomputed, a block keeps its input only, and the rest is transient.
    full = costs.kept_bytes(tp=1, samples=3, recompute="full")
    assert full[1] <= kept[1]
    work = costs.workspace_bytes(tp=1, samples=3, recompute="full")
    assert work[1] == 150.0 + kept[1] - full[1]


def test_bytes_are_the_most_of_any_kind() -> None:
    two = changed()
    other = copy.deepcopy(OWN["timings"][0]) | {"gpu": "V100-16", "kept_bytes": [1.0, 999.0, 1.0]}
    two["timings"].append(other)
    kept = costs_of(read(two)).kept_bytes(tp=1, samples=1, recompute="none")
    np.testing.assert_array_equal(kept, [10.0, 999.0, 5.0])


def test_bytes_measured_with_another_attention_are_not_those_of_the_job() -> None:
    """Here with flash attention, where the job keeps its scores."""
    flash, eager = (replace(JOB, flash_attention=each) for each in (True, False))
    modelled = {job: costs_of(None, job) for job in (flash, eager)}
    measured = {job: costs_of(read(OWN), job) for job in (flash, eager)}
    asked: dict[str, Any] = {"tp": 1, "samples": 2, "recompute": "none"}
    assert measured[flash].kept_bytes(**asked).tolist() == [20.0, 200.0, 5.0]
    # What the file counts per sample, by what the two differ in.
    ratio = modelled[eager].kept_bytes(**asked) / modelled[flash].kept_bytes(**asked)
    wanted = 4.0 * 2 * np.array([4, 40, 9]) * ratio
    np.testing.assert_allclose(measured[eager].kept_bytes(**asked), wanted)
    assert ratio[1] > 1
    work = [found[eager].workspace_bytes(**asked).tolist() for found in (measured, modelled)]
    assert work[0] == work[1]


def test_a_layer_of_frozen_weights_has_none_at_any_degree() -> None:
    """As with LoRA, where only small layers beside them are trained."""
    block = MODEL.layers[1]
    tensors = tuple(replace(each, frozen=True) for each in block.tensors)
    layers = (MODEL.layers[0], replace(block, tensors=tensors), MODEL.layers[2])
    frozen = changed()
    frozen["sizes"][0]["parameters"][1] = 0
    costs = costs_of(read(frozen), replace(JOB, model=replace(MODEL, layers=layers)))
    assert costs.parameters(2)[1] == 0
    assert costs.parameters(2)[0] == MODEL.layers[0].parameters(2)


def test_bytes_measured_on_a_kind_without_bf16_are_for_such_kinds() -> None:
    two = changed(precision="bf16")
    other = copy.deepcopy(OWN["timings"][0]) | {"gpu": "V100-16", "kept_bytes": [1.0, 999.0, 1.0]}
    two["timings"].append(other)
    costs = costs_of(read(two), replace(JOB, precision="bf16"))
    asked: dict[str, Any] = {"tp": 1, "samples": 1, "recompute": "none"}
    assert costs.kept_bytes(**asked, gpu="A100-40").tolist() == [10.0, 100.0, 5.0]
    assert costs.kept_bytes(**asked, gpu="T4").tolist() == [1.0, 999.0, 1.0]


def test_a_shared_tensor_counts_as_in_the_model() -> None:
    assert costs_of(read(OWN)).tied_parameters(1) == costs_of(None).tied_parameters(1) > 0
    assert costs_of(read(OWN)).notes == ()


# -- which profile a job uses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "fingerprint", "is_used"),
    [
        (None, MODEL.fingerprint, True),
        (None, "another model", False),
        ("gpt2", MODEL.fingerprint, True),
        ("gpt2", None, True),  # It does not say, and the user does.
    ],
)
def test_a_job_uses_the_profile_of_its_model(
    tmp_path: Path, named: str | None, fingerprint: str | None, is_used: bool
) -> None:
    text = json.dumps(changed() if fingerprint is None else changed(fingerprint=fingerprint))
    (tmp_path / "profiles_gpt2.json").write_text(text)
    measured = load_measurements(tmp_path, catalogue=load_catalogue())
    job = replace(JOB, profile=named)
    found = measured.profile_of(job, catalogue=load_catalogue())
    assert (found is not None) == is_used
    ahead = read_ahead(measured, job, load_catalogue())
    assert (ahead.profile_of(job, catalogue=load_catalogue()) is not None) == is_used


def test_a_named_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profiles_gpt2.json").write_text(json.dumps(changed(fingerprint="another")))
    measured = load_measurements(tmp_path, catalogue=load_catalogue())
    job = replace(JOB, profile="gpt2")
    for find in (measured.profile_of, partial(read_ahead, measured)):
        with pytest.raises(InputError) as caught:
            find(job, catalogue=load_catalogue())
        (problem,) = caught.value.problems
        assert problem.place == "profile gpt2"
        assert "another model" in problem.what
        assert "sailorctl profile model" in problem.cure


def test_names_of_files_hold_no_separator() -> None:
    assert profile_name("meta-llama/Llama 3.1") == "meta-llama-Llama-3.1"
    assert profile_name("../..") == "model"
