"""The LLaMA-like model that the check trains, as large as half of the device's memory allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.setting import ZONE, Setting
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage
from worker.data.sources.open_data import open_data
from worker.distributed.single_rank import SingleRankTransport
from worker.training.trainer import RankTrainer

STATE_BYTES = 18
"""Bytes for each parameter: bf16 weight, and master, gradient and two moments in fp32."""
_BLOCK, _EMBEDDINGS = 47_000_000, 131_000_000
"""Parameters of a block, and of embedding and head."""


def llama_job(setting: Setting, *, layers: int | None = None, **changes: Any) -> Job:
    """Return a job in bf16; ``changes`` sets its other fields."""
    numbers: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
    sequence, batch, vocab = 16, 4, 64
    if not setting.is_quick:
        memory = torch.cuda.mem_get_info(0)[0] if setting.device == "cuda" else 4 * 2**30
        fitting = int((0.45 * memory / STATE_BYTES - _EMBEDDINGS) / _BLOCK)
        numbers = {
            "layers": min(layers or 20, max(2, min(20, fitting))),
            "hidden": 2048,
            "heads": 16,
            "kv_heads": 8,
            "ffn": 5632,
        }
        sequence, batch, vocab = 2048, 8, 32000
    model = build_model("llama", vocab=vocab, sequence=sequence, **numbers)
    job = Job("gpu-check", model, global_batch=batch, sequence=sequence, precision="bf16")
    return replace(job, optimizer="adamw", clip_norm=1.0, learning_rate=1e-4, **changes)


def plan_for(
    setting: Setting,
    job: Job,
    *,
    stages: int = 1,
    schedule: Schedule = "1f1b",
    micro_batch: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> Plan:
    """Return a plan of one pipeline; layers are divided evenly."""
    kind, layers = setting.kind()[0], len(job.model.layers)
    ends = [round(layers * (number + 1) / stages) for number in range(stages)]
    place = Place(kind, f"{kind}x1", ZONE, node="here")
    cuts = zip([0, *ends[:-1]], ends, strict=True)
    pipeline = Pipeline(
        job.global_batch // micro_batch, tuple(Stage(cut, tp, (place,)) for cut in cuts)
    )
    return Plan(micro_batch, (pipeline,), schedule, sequence_parallel=sequence_parallel)


def trainer_for(
    setting: Setting, job: Job, plan: Plan | None = None, **options: Any
) -> RankTrainer:
    """Return a rank that trains a whole job."""
    plan, data = plan or plan_for(setting, job), open_data(job, Path())
    return RankTrainer(job, plan, 0, SingleRankTransport(), data, device=setting.place, **options)
