"""The profiles of examples/profiles, and the step that was measured beside them (docs/gpu.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.api import estimator, load_measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

PROFILES = Path(__file__).resolve().parents[2] / "examples" / "profiles"
MEASURED_S, MEASURED_GIB = 0.2765, 26.3 + 1
"""The step, and the memory that the allocator reserved, with 1 GiB for context and libraries."""
GPU, ZONE = "H200-141", "us-central1-a"


@pytest.mark.parametrize("profile", [None, "llama-1b"])
def test_measured_step_is_predicted(profile: str | None, tmp_path: Path) -> None:
    model = build_model(
        "llama",
        layers=20, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, sequence=2048,
    )  # fmt: skip
    job = Job(
        "check", model, global_batch=8, sequence=2048, precision="bf16", optimizer="adamw",
        profile=profile,
    )  # fmt: skip
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'[[pool]]\nzone = "{ZONE}"\ngpu = "{GPU}"\ngpus_per_machine = 1\ngpus = 1\n',
        encoding="utf-8",
    )
    cluster = load_cluster(path)
    place = Place(GPU, cluster.pools[0].key[1], ZONE)
    stage = Stage((0, len(model.layers)), 1, (place,))
    plan = Plan(2, (Pipeline(4, (stage,)),))
    folder = None if profile is None else PROFILES
    measurements = load_measurements(folder, catalogue=load_catalogue())
    found = estimator("event", job=job, cluster=cluster, measurements=measurements).estimate(plan)
    assert found.iteration_s == pytest.approx(MEASURED_S, rel=0.1)
    assert found.memory[0][0].total / 2**30 == pytest.approx(MEASURED_GIB, rel=0.05)
    assert found.provenance.source == ("analytic" if profile is None else "measured")
