"""Profile files: both formats give the same profile, and mistakes are reported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile import Profile
from simulator.layer_costs.profile_file import profile_to_json, read_profile

SMALL: dict[str, Any] = {
    "sailor_profile": 1,
    "model": "tiny",
    "sequence": 16,
    "precision": "bf16",
    "layers": ["embedding", "block 1", "head"],
    "sizes": [
        {
            "tp": 1,
            "parameters": [10, 20, 30],
            "output_elements": [4, 4, 1],
            "kept_elements": [4, 40, 9],
        }
    ],
    "timings": [
        {
            "gpu": "v100",
            "tp": 1,
            "micro_batch": 2,
            "forward_s": [0.1, 0.2, 0.3],
            "backward_s": [0.0, 0.4, 0.6],
            "optimizer_s": 0.01,
            "note": "made up",
        }
    ],
}


def read(data: dict[str, Any]) -> Profile:
    document = parse_document(json.dumps(data).encode(), name="profiles_tiny.json")
    return read_profile(document, catalogue=load_catalogue())


def places(data: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(data)
    return [problem.place for problem in caught.value.problems]


def test_own_format_is_read_with_aliases_normalised() -> None:
    profile = read(SMALL)
    timing = profile.timings["V100-16", 1, 2]
    assert profile.name == "tiny"
    assert profile.precision == "bf16"
    assert timing.forward_s.tolist() == [0.1, 0.2, 0.3]
    assert timing.notes == ("made up",)
    assert profile.optimizer_parameters == {1: 60}


def test_own_format_round_trips() -> None:
    once = profile_to_json(read(SMALL))
    assert profile_to_json(read(once)) == once


def test_all_mistakes_are_reported_with_their_places() -> None:
    broken = copy.deepcopy(SMALL)
    broken["sequence"] = -1
    broken["timings"][0]["gpu"] = "V200"
    broken["timings"][0]["forward_s"] = [0.1, None, 0.3]
    broken["sizes"][0]["parameters"] = [1, 2]
    assert places(broken) == [
        "profiles_tiny.json: sequence",
        "profiles_tiny.json: sizes[0].parameters",
        "profiles_tiny.json: timings[0].gpu",
        "profiles_tiny.json: timings[0].forward_s",
    ]


def test_forward_of_zero_seconds_is_rejected() -> None:
    broken = copy.deepcopy(SMALL)
    broken["timings"][0]["forward_s"][1] = 0.0
    assert places(broken) == ["profiles_tiny.json: timings[0].forward_s"]


def test_repeated_measurement_is_rejected() -> None:
    broken = copy.deepcopy(SMALL)
    broken["timings"].append(copy.deepcopy(broken["timings"][0]))
    assert places(broken) == ["profiles_tiny.json: timings[1].micro_batch"]


def test_newer_version_is_rejected() -> None:
    assert places(SMALL | {"sailor_profile": 2}) == ["profiles_tiny.json: sailor_profile"]


@pytest.mark.parametrize("name", ["OPT-350", "GPT-Neo-2.7", "OPT-30", "LLAMA-3-8"])
def test_published_profiles_convert_to_the_own_format(reference: Path, name: str) -> None:
    path = reference / f"profiles_{name}.json"
    document = parse_document(path.read_bytes(), name=path.name)
    published = read_profile(document, catalogue=load_catalogue())
    ours = read(profile_to_json(published))
    assert ours.layer_names == published.layer_names
    assert ours.sizes == published.sizes
    assert set(ours.timings) == set(published.timings)
    for key, timing in published.timings.items():
        np.testing.assert_array_equal(timing.forward_s, ours.timings[key].forward_s)
        np.testing.assert_array_equal(timing.backward_s, ours.timings[key].backward_s)


def test_the_last_two_entries_of_llama_form_its_head(reference: Path) -> None:
    path = reference / "profiles_LLAMA-3-8.json"
    document = parse_document(path.read_bytes(), name=path.name)
    profile = read_profile(document, catalogue=load_catalogue())
    assert len(profile.layer_names) == 34
    assert profile.sizes[1].parameters[-1] == 8192
