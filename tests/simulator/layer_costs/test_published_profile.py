"""What a profile in the published format says, and how its mistakes are reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile import Profile
from simulator.layer_costs.published_profile import profile_from_json

FILE: dict[str, Any] = {
    "model": "tiny",
    "config": {"seq_len": 16, "transformer_layers": 1},
    "layers": ["embedding", "transformer_1", "final_norm", "lm_head"],
    "timing": {
        "v100-16": {
            "tp1": {
                "mbs2": {
                    "fwd_s": [1.0, 2.0, 3.0, 4.0],
                    "bwd_s": [0.0, 4.0, 6.0, 8.0],
                    "optimizer_step_s": 0.5,
                }
            }
        }
    },
    "memory_per_layer": {
        "tp1": {
            "params_floats": [10, 20, 30, 40],
            "act_output_floats": [4, 4, 4, 1],
            "act_mem_floats": [4, 40, 5, 9],
        }
    },
    "optimizer_profile_model_params": {"tp1": 60},
}
ENTRY = ("timing", "v100-16", "tp1", "mbs2")
AT = "file: timing.v100-16.tp1.mbs2"


def changed(*path: str, to: Any) -> dict[str, Any]:
    raw = copy.deepcopy(FILE)
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return raw


def read(raw: dict[str, Any]) -> Profile:
    return profile_from_json(raw, place="file", catalogue=load_catalogue())


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(raw)
    return [str(problem) for problem in caught.value.problems]


def test_separate_final_norm_is_merged_into_the_head() -> None:
    profile = read(FILE)
    assert profile.layer_names == ("embedding", "transformer_1", "lm_head")
    timing = profile.timings["V100-16", 1, 2]
    assert timing.forward_s.tolist() == [1.0, 2.0, 7.0]
    assert timing.backward_s.tolist() == [0.0, 4.0, 14.0]
    sizes = profile.sizes[1]
    assert (sizes.parameters, sizes.kept_elements) == ((10, 20, 70), (4, 40, 14))
    assert sizes.output_elements == (4, 4, 1), "the head's output is that of its last layer"


def test_layers_as_many_as_the_blocks_and_two_stay_as_they_are() -> None:
    profile = read(changed("config", "transformer_layers", to=2))
    assert len(profile.layer_names) == len(profile.sizes[1].parameters) == 4


def test_names_and_numbers_are_read_from_keys() -> None:
    profile = read(FILE)
    assert (profile.name, profile.sequence, profile.precision) == ("tiny", 16, "fp32")
    assert profile.optimizer_parameters == {1: 60}


def test_a_step_of_zero_seconds_was_not_timed() -> None:
    assert read(FILE).timings["V100-16", 1, 2].optimizer_s == 0.5
    raw = changed(*ENTRY, "optimizer_step_s", to=0)
    assert read(raw).timings["V100-16", 1, 2].optimizer_s is None


def test_runs_that_ran_out_of_memory_are_left_out() -> None:
    raw = changed("timing", "v100-16", "tp1", "mbs4", to={"fwd_s": None, "error": "oom"})
    assert set(read(raw).timings) == {("V100-16", 1, 2)}


def test_flags_become_notes_of_the_entries_that_they_name() -> None:
    flag = {"gpu": "v100-16", "where": "tp1, mbs2", "flag": "copied_value"}
    raw = changed("flags", to=[flag, flag | {"where": "tp1, mbs8"}])
    assert read(raw).timings["V100-16", 1, 2].notes == ("v100-16 tp1 mbs2: copied value",)


@pytest.mark.parametrize("key", ["model", "config", "layers", "timing", "memory_per_layer"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = {name: value for name, value in FILE.items() if name != key}
    assert problems(raw) == [f'file: the key "{key}" is missing; see docs/formats.md, profiles']


def test_numbers_that_no_float_holds_are_refused() -> None:
    for path in ((*ENTRY, "fwd_s"), ("optimizer_profile_model_params", "tp1")):
        huge = [2**1024] * 4 if path[-1] == "fwd_s" else 2**1024
        assert "too large" in problems(changed(*path, to=huge))[0]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("fwd_s", [1.0], "fwd_s: must be a list of 4 numbers, one per layer"),
        ("fwd_s", [1.0, 2.0, 0.0, 4.0], "fwd_s: holds a zero; measure it again"),
        (
            "bwd_s",
            [0.0, -1.0, 1.0, 1.0],
            "bwd_s[1]: must be a number that is zero or more, not -1.0; measure it again",
        ),
        ("optimizer_step_s", True, "optimizer_step_s[0]: must be a number that is zero or more, not"
         " True; measure it again"),
    ],
)  # fmt: skip
def test_a_wrong_time_is_reported_at_its_place(key: str, value: object, problem: str) -> None:
    assert problems(changed(*ENTRY, key, to=value)) == [f"{AT}.{problem}"]


def test_other_mistakes_are_reported_at_their_places() -> None:
    assert problems(changed("layers", to="all")) == ["file: layers: must be a list of names"]
    assert problems(changed("timing", to={})) == ["file: timing: has no measurement"]
    assert problems(changed("timing", "v100-16", to=[])) == [
        "file: timing.v100-16: must be a table"
    ]
    (unknown,) = problems(changed("timing", to={"V200": FILE["timing"]["v100-16"]}))
    assert unknown.startswith('file: timing.V200.tp1.mbs2: no GPU "V200" is known')
    (degree,) = problems(changed("memory_per_layer", to={"tp": FILE["memory_per_layer"]["tp1"]}))
    assert degree.startswith("tp: has no positive number")
    assert problems(changed("precision", to="int8"))[0].startswith("file: precision: is 'int8'")
