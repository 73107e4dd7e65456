"""Damaged profiles, networks and validation files are read or raise ``InputError``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.api import Measurements
from simulator.documents.files import Document, parse_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile_file import read_profile
from simulator.network.network_file import network_from_json
from simulator.validate_runs import validate
from tests.simulator.layer_costs.test_profile_file import SMALL
from tests.simulator.test_run_file import RUN as OWN_RUN

FORMATS = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")
PUBLISHED: dict[str, Any] = {
    "model": "tiny",
    "config": {"seq_len": 16, "transformer_layers": 1},
    "layers": ["embedding", "transformer_1", "lm_head"],
    "timing": {
        "V100-16": {
            "tp1": {
                "mbs2": {
                    "fwd_s": [0.1, 0.2, 0.3],
                    "bwd_s": [0.0, 0.4, 0.6],
                    "optimizer_step_s": 0.01,
                }
            }
        }
    },
    "memory_per_layer": {
        "tp1": {
            "params_floats": [10, 20, 30],
            "act_output_floats": [4, 4, 1],
            "act_mem_floats": [4, 40, 9],
        }
    },
    "optimizer_profile_model_params": {"tp1": 60},
    "flags": [{"gpu": "V100-16", "where": "tp1, mbs2", "flag": "made_up"}],
}
NETWORK: dict[str, Any] = {
    "sizes_bytes": [1000, 2000],
    "curves": [
        {
            "id": 0,
            "coeffs": [0.0, 0.1, 1.0],
            "bandwidth_GBps": [1.0, 2.0],
            "transport": "tcp",
            "low_GBps": [0.9, 1.9],
            "high_GBps": [1.1, 2.1],
        }
    ],
    "inter_node": [
        {
            "from": {"zone": "z", "gpu_type": "V100-16", "gpus": 1},
            "to": {"zone": "z", "gpu_type": "V100-16", "gpus": 1},
            "curve": 0,
        }
    ],
    "intra_node": [{"gpu_type": "V100-16", "gpus": 2, "curve": 0}],
    "egress_usd_per_GB": {"zone_to_zone": {"a": {"b": 0.01}}},
    "gpu_price_usd_per_hour": {"simulations_constants_GPU_PRICES": {"V100-16": {"z": 2.0}}},
    "gpus_per_node": {"V100-16": 4},
}
RUN: dict[str, Any] = {
    "id": "run",
    "model": "tiny",
    "seq_len": 16,
    "gpus_per_node": 4,
    "plan": {
        "micro_batch_size": 1,
        "global_batch_size": 2,
        "stages": [
            {
                "layers": [0, 1, 2],
                "replicas": [{"gpu_type": "V100-16", "tp": 1, "zone": "us-central1-a"}],
            }
        ],
    },
    "measured_iter_time_s": 1.0,
    "measured_peak_memory_bytes": {"max_over_gpus": 1e9},
    "flags": {"time_valid": True},
}

ORDERED = {"facts": {"rank_order": "tp, pp, dp", "gradient_allreduce_bytes": 4}}


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in inner:
            yield from spots(item, (*path, key))


def damaged(document: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    """Return the document with one value replaced, or removed if ``junk`` is ``...``."""
    copied = copy.deepcopy(document)
    target: Any = copied
    for key in path[:-1]:
        target = target[key]
    if junk is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = junk
    return copied


JUNK = st.sampled_from(
    [..., None, True, -1, 0, 1e308, "", "tp", "NaN", [], {}, [1, "a"], {"a": 1}, "x" * 200, 2.5]
)


def wounds(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(damaged, st.just(document), st.sampled_from(list(spots(document))), JUNK)


def parsed(data: dict[str, Any]) -> Any:
    return parse_document(json.dumps(data).encode(), name="file.json")


@pytest.mark.chaos
@given(st.one_of(wounds(SMALL), wounds(PUBLISHED)))
def test_damaged_profile_is_read_or_rejected(data: dict[str, Any]) -> None:
    try:
        profile = read_profile(parsed(data), catalogue=load_catalogue())
    except InputError:
        pass
    else:
        assert all((timing.forward_s > 0).all() for timing in profile.timings.values())


@pytest.mark.chaos
@given(wounds(NETWORK))
def test_damaged_network_is_read_or_rejected(data: dict[str, Any]) -> None:
    try:
        measured = network_from_json(data, place="network.json", catalogue=load_catalogue())
    except InputError:
        pass
    else:
        assert all(
            curve(1500.0) > 0 for table in measured.between.values() for curve in table.values()
        )


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    path = tmp_path_factory.mktemp("profiles") / "profiles_tiny.json"
    config = {
        "seq_len": 16,
        "transformer_layers": 1,
        "hidden": 8,
        "heads": 2,
        "ffn_hidden": 32,
        "vocab_padded": 64,
    }
    path.write_text(json.dumps(PUBLISHED | {"config": config}))
    return Measurements(folder=str(path.parent), paths={"tiny": path})


def test_undamaged_run_is_estimated(measurements: Measurements) -> None:
    report = validate(
        Document("runs.json", {"cases": [RUN]}),
        measurements=measurements,
        catalogue=load_catalogue(),
    )
    assert report.failures == ()
    assert [c.case for c in report.comparisons] == ["run"]


def test_runs_under_zero_stages_that_are_not_modelled_are_named(
    measurements: Measurements,
) -> None:
    """They were predicted as ZeRO-1, which keeps all gradients and weights."""
    report = validate(
        Document("runs.json", {"cases": [RUN | {"zero_stage": 3}]}),
        measurements=measurements,
        catalogue=load_catalogue(),
    )
    assert report.comparisons == ()
    assert "zero_stage is 3, not one of 0, 1" in report.failures[0][1]


def test_schema_and_documentation_describe_runs() -> None:
    schema = json.loads(
        resources.files("simulator").joinpath("data/schemas/runs.schema.json").read_text("utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    section = FORMATS.partition("\n## Validation cases\n")[2]
    shown = json.loads(section.partition("```json\n")[2].partition("```")[0])
    for document in ({"cases": [RUN]}, shown):
        validator.validate(document)
    assert not validator.is_valid({"cases": []})
    for key in schema["properties"]["cases"]["items"]["properties"]:
        assert f"`{key}`" in section, key


@pytest.mark.chaos
@given(data=wounds({"cases": [RUN]}) | wounds({"runs": [OWN_RUN | ORDERED]}))
def test_damaged_runs_are_estimated_or_rejected(
    measurements: Measurements, data: dict[str, Any]
) -> None:
    try:
        report = validate(
            Document("runs.json", data), measurements=measurements, catalogue=load_catalogue()
        )
    except InputError:
        pass
    else:
        assert all(c.time_predicted_s > 0 for c in report.comparisons)
        assert all(reason for _, reason in report.failures)
