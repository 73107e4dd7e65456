"""Trains the model that a job file names by ``[model] hf``, on the job's own data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from simulator.documents.files import Document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.data.batch import DataSource, Samples
from worker.data.data_files import DataFile, files_of, place_of
from worker.data.sources.open_data import SampleForm, open_samples
from worker.script.hf_model import hf
from worker.script.losses import cross_entropy
from worker.script.recipe import Recipe
from worker.script.torch_settings import OptimizerSettings

_PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class NamedSamples:
    """Samples of a job's data, under the names by which models of transformers take them."""

    source: DataSource
    name: str

    @property
    def files(self) -> tuple[DataFile, ...]:
        return files_of(self.source)

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions of the batch of this step."""
        found = self.source.batch(step, positions)
        batch = {self.name: found.inputs, "labels": found.labels}
        return Samples(batch, None, found.digests)


def names_hf(document: Document) -> bool:
    """Return whether a job file names a model of transformers without its description."""
    model = document.data.get("model")
    return isinstance(model, dict) and "hf" in model and "description" not in model


def described_job(document: Document) -> tuple[Job, Recipe]:
    """Read such a job file, and describe its model."""
    unknown = replace(_UNKNOWN, name=str(document.data["model"]["hf"]))
    job = job_from_document(document, undescribed=unknown)
    if job.dropout:
        what = f"is {job.dropout}, but {job.hf} has rates of its own"
        raise InputError(Problem("[training] dropout", what, "change them in its config.json"))
    recipe = hf_recipe(job, document.folder)
    found = recipe.job()
    model = _count_by_token(found.model, job.sequence)
    return replace(job, model=model, max_tp=found.max_tp), recipe


_UNKNOWN = Model("", "module", (), 1, 1, 1, 1, 1, 1, learned_positions=False, tied=False)
"""Stands for a model until it is described."""


def _count_by_token(model: Model, sequence: int) -> Model:
    """Count what layers hand on by token: a module is traced with whole samples."""
    if any(layer.output_per_token % sequence for layer in model.layers[:-1]):
        cure = "give 1, which counts by image"
        raise InputError(Problem("[training] sequence", "is not the model's", cure))
    layers = tuple(
        replace(
            layer,
            output_per_token=-(-layer.output_per_token // sequence),
            allreduce_per_token=layer.allreduce_per_token // sequence,
        )
        for layer in model.layers
    )
    return replace(model, layers=layers, hidden=layers[0].output_per_token)


def hf_recipe(job: Job, base: Path) -> Recipe:
    """Open the model and the data of a job; relative names are looked up in ``base``."""
    assert job.hf is not None, "the job names a model of transformers"
    inside = place_of(job, base, job.hf)
    module = hf(inside if inside.is_dir() else job.hf)
    form = _form_of(module)
    if form.image and job.data.kind == "images":
        _check_scaling(Path(str(getattr(module.config, "name_or_path", ""))))
    name = "pixel_values" if form.image else "input_ids"
    return Recipe(
        model=module,
        dataset=(),
        batch_size=job.global_batch,
        samples=NamedSamples(open_samples(job, base, form), name),
        loss=None if form.image else next_token_loss,
        given_settings=OptimizerSettings(),
        steps=job.steps,
        precision=job.precision,
        max_tp=job.max_tp,
        seed=job.data.seed,
        name=job.name,
    )


def next_token_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of labels that are the tokens behind those of the input."""
    return cross_entropy(output.logits, batch["labels"])


def _form_of(module: nn.Module) -> SampleForm:
    config: Any = module.config
    if getattr(module, "loss_type", None) != "ForImageClassification":
        return SampleForm(config.get_text_config().vocab_size)
    size = config.image_size
    edges = set(size) if isinstance(size, list | tuple) else {size}
    if len(edges) > 1:
        raise InputError(Problem("[model] hf", f"has images of {size}, which are not square"))
    return SampleForm(config.num_labels, image=edges.pop(), channels=config.num_channels)


def _check_scaling(source: Path) -> None:
    """Refuse a model whose images are scaled otherwise than to -1 to 1."""
    try:
        given = json.loads((source / _PROCESSOR).read_text(encoding="utf-8"))
    except OSError:
        return
    for key in ("image_mean", "image_std"):
        if any(value != 0.5 for value in given.get(key) or ()):
            what = f"has {key} {given[key]}, and [data] images are scaled by 0.5"
            cure = "train it by a script whose data set scales its images"
            raise InputError(Problem(str(source / _PROCESSOR), what, cure))
