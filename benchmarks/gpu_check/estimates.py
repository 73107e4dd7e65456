"""What the simulator expects of one device, without measurements and with a profile made here."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.setting import ZONE, Setting
from simulator.api import estimator, load_measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile import profile_name
from simulator.layer_costs.profile_file import profile_to_json
from simulator.spec.job import Job
from simulator.spec.plan import Place, Plan


def predicted(setting: Setting, job: Job, plan: Plan, profiles: Path | None) -> dict[str, Any]:
    """Return the predicted step time and memory of a plan of one rank."""
    kind, is_known = setting.kind()
    catalogue = load_catalogue()
    text = f'[[pool]]\nzone = "{ZONE}"\ngpu = "{kind}"\ngpus_per_machine = 1\ngpus = 1\n'
    path = setting.out / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    cluster = load_cluster(path)
    measured = load_measurements(profiles, catalogue=catalogue)
    gpu, machine, zone = cluster.pools[0].key
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    here = replace(stage, places=(Place(gpu, machine, zone),))
    plan = replace(plan, pipelines=(replace(pipeline, stages=(here,)),))
    found = estimator("event", job=job, cluster=cluster, measurements=measured).estimate(plan)
    return {
        "kind": kind if is_known else f"{kind}, which this device is not",
        "step_s": found.iteration_s,
        "peak_memory_gib": found.memory[0][0].total / 2**30,
        "relative_error": found.provenance.relative_error,
    }


class _Quiet:
    def sampling(self, what: str, samples: int) -> None: ...
    def finished(self, what: str, figures: Any) -> None: ...
    def ended(self, what: str, why: str) -> None: ...


def measured_profile(
    setting: Setting, job: Job, sizes: tuple[int, ...], folder: Path, budget_s: float
) -> dict[str, Any]:
    """Measure the job's distinct layers, for the planner, into a file of ``folder``."""
    from worker.layer_profiles.device import open_device  # noqa: PLC0415 - needs safetensors
    from worker.layer_profiles.profile_job import Request, profile_job  # noqa: PLC0415 - the same

    kind, _ = setting.kind()
    device = open_device(setting.device, kind, load_catalogue())
    name = profile_name(job.profile or job.model.name)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    request = Request((1,), sizes, budget_s, name, today)
    profile = profile_job(job, None, request, device, _Quiet(), now=time.monotonic)
    path = folder / f"profiles_{name}.json"
    path.write_text(json.dumps(profile_to_json(profile), indent=1) + "\n", encoding="utf-8")
    spread = max(timing.relative_error for timing in profile.timings.values())
    return {"file": path.name, "micro_batches": list(sizes), "spread": spread}
