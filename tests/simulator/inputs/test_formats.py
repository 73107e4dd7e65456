"""``docs/formats.md`` agrees with the schemas, and its examples are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from simulator.cluster.cluster_file import cluster_from_document
from simulator.documents.files import Document, load_document, parse_document
from simulator.estimate.result import DeviceMemory, Estimate, Money, StageTime
from simulator.inputs.job_file import job_from_document
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import plan_from_document
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.layer_costs.profile_file import profile_to_json
from simulator.models.description_file import describe
from simulator.models.presets import preset
from simulator.spec.provenance import MEASURED

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text("utf-8")
SCHEMAS = {
    entry.name.removesuffix(".schema.json"): json.loads(entry.read_text("utf-8"))
    for entry in (resources.files("simulator") / "data/schemas").iterdir()
    if entry.name.endswith(".schema.json")
}


def rows(rule: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key that a schema describes."""
    if isinstance(rule, list):
        for item in rule:
            yield from rows(item)
    elif isinstance(rule, dict):
        for key, inner in rule.get("properties", {}).items():
            if isinstance(inner, dict) and "description" in inner:
                yield key, inner
        for inner in rule.values():
            yield from rows(inner)


def examples(heading: str, language: str) -> list[Document]:
    section = DOCUMENT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    assert found, f"the section {heading} has no example"
    return [parse_document(text.encode(), name=heading) for text in found]


@pytest.mark.parametrize("name", ["job", "cluster", "plan"])
def test_every_key_is_documented_with_its_default(name: str) -> None:
    found = list(rows(SCHEMAS[name]))
    assert len(found) > 10
    for key, rule in found:
        if rule.get("type") == "object":
            assert f"[{key}]" in DOCUMENT
            continue
        lines = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{key}` |")]
        if key in ("pool", "zone", "quota", "zone_link") and rule.get("type") == "array":
            assert f"[[{key}]]" in DOCUMENT
            continue
        if key == "catalogue":
            continue  # it stands alone at the top of its file, and is told in a sentence
        said = [line for line in lines if rule["description"] in line]
        assert said, f"{key}: {rule['description']}"
        if "default" in rule:
            assert any(f"`{json.dumps(rule['default'])}`" in line for line in said), key


def test_every_documented_key_of_a_job_is_in_its_schema() -> None:
    """An editor that checks by the schema would refuse it."""
    text = DOCUMENT.partition("\n## Job\n")[2].partition("\n## ")[0]
    sections = dict(re.findall(r"\n### \[(\w+)\]\n(.*?)(?=\n### |\Z)", text, flags=re.DOTALL))
    assert len(sections) == 7
    for name, body in sections.items():
        documented = set(re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE))
        assert documented
        assert documented <= SCHEMAS["job"]["properties"][name]["properties"].keys(), name


def test_every_schema_is_linked() -> None:
    for name in SCHEMAS:
        assert f"`{name}.schema.json`" in DOCUMENT


def test_examples_are_read_and_fit_together() -> None:
    (job_document,) = examples("Job", "toml")
    (cluster_document,) = examples("Cluster", "toml")
    (plan_document,) = examples("Plan", "json")
    for name, document in (
        ("job", job_document),
        ("cluster", cluster_document),
        ("plan", plan_document),
    ):
        jsonschema.validate(document.data, SCHEMAS[name])
    problems = check_plan(
        plan_from_document(plan_document),
        job_from_document(job_document),
        cluster_from_document(cluster_document),
    )
    assert problems == ()


def test_the_example_of_a_catalogue_fits_its_schema() -> None:
    (document,) = examples("Catalogue", "toml")
    jsonschema.validate(document.data, SCHEMAS["catalogue"])


def test_an_estimate_fits_its_schema() -> None:
    device = DeviceMemory(*[1e9] * 8, capacity=2e10)
    estimate = Estimate(
        estimator="event",
        iteration_s=1.5,
        samples_per_iteration=64,
        memory=((device,),),
        money=Money(None, 0.0, unpriced=("GH-96@lab-1",)),
        stages=((StageTime(1.0, 0.2, 0.1, 0.2),),),
        bottleneck="pipelines[0].stages[0]",
        provenance=MEASURED,
    )
    validator = jsonschema.Draft202012Validator(SCHEMAS["estimate"])
    validator.validate(json.loads(json.dumps(estimate.to_json())))
    assert not validator.is_valid({**estimate.to_json(), "iteration_s": 0})
    undocumented = set(estimate.to_json()) - set(SCHEMAS["estimate"]["properties"])
    assert not undocumented


@pytest.mark.parametrize("name", ["opt-350m", "llama-3-8b", "vit-l"])
def test_a_model_description_fits_its_schema(name: str) -> None:
    written = json.loads(json.dumps(describe(preset(name))))
    jsonschema.validate(written, SCHEMAS["model"])


def test_written_profile_fits_its_schema() -> None:
    profile = Profile(
        name="toy",
        sequence=128,
        precision="bf16",
        layer_names=("embedding", "block", "head"),
        timings={("T4", 1, 2): Timing(np.ones(3), np.ones(3), 0.5, ("doubtful",))},
        sizes={1: LayerSizes((3, 4, 5), (1, 1, 1), (2, 2, 2))},
        optimizer_parameters={1: 12},
        config={},
    )
    written = json.loads(json.dumps(profile_to_json(profile)))
    jsonschema.validate(written, SCHEMAS["profile"])
    del written["sizes"]
    assert not jsonschema.Draft202012Validator(SCHEMAS["profile"]).is_valid(written)


def test_published_measurements_fit_the_schemas(reference: Path) -> None:
    profiles = sorted(reference.glob("profiles_*.json"))
    assert profiles
    for path in profiles:
        jsonschema.validate(load_document(path).data, SCHEMAS["profile"])
    jsonschema.validate(load_document(reference / "network.json").data, SCHEMAS["network"])
