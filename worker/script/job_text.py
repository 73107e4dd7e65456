"""Writes a described job as the text that is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.documents.fields import toml_value
from simulator.documents.files import Document
from simulator.models.description_file import inline_description
from simulator.spec.job import Job


def job_text(job: Job, script: Path) -> str:
    """Return the job file of a script's job: settings, and the model as described by tracing."""
    sections: dict[str, dict[str, Any]] = {
        "job": {"name": job.name},
        "model": {
            "script": str(script),
            "description": inline_description(job.model),
        },
        "training": {
            "global_batch": job.global_batch,
            "sequence": job.sequence,
            "precision": job.precision,
            "optimizer": job.optimizer,
            "learning_rate": job.learning_rate,
            "betas": list(job.update.betas),
            "epsilon": job.update.epsilon,
            "weight_decay": job.update.weight_decay,
            "momentum": job.update.momentum,
            "nesterov": job.update.nesterov or None,
            "recompute": job.recompute,
            "max_tp": job.max_tp,
            "steps": job.steps,
            "clip_norm": job.clip_norm,
            "skip_nonfinite": job.skip_nonfinite,
        },
        "data": {
            "seed": job.data.seed,
            "samples": job.data.samples,
            "num_workers": job.data.num_workers or None,
        },
    }
    return _toml(sections)


def described_text(document: Document, job: Job) -> str:
    """Return a job file with the description of the model of transformers that it names."""
    sections = {name: dict(values) for name, values in document.data.items()}
    sections["model"]["description"] = inline_description(job.model)
    sections["training"]["max_tp"] = job.max_tp
    return _toml(sections)


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        # TOML has no null. Times may be given as text.
        lines += [f"{k} = {toml_value(v)}" for k, v in values.items() if v is not None]
        lines.append("")
    return "\n".join(lines)
