"""Opens the data of a job."""

from __future__ import annotations

from pathlib import Path

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.data.batch import SAMPLES_MAX, DataSource
from worker.data.image_data import ImageData, open_image_arrays, open_image_folder
from worker.data.synthetic import SyntheticImages, SyntheticTokens
from worker.data.token_file import open_tokens


def open_data(job: Job, base: Path) -> DataSource:
    """Open the data of a job; paths are relative to the job file."""
    if job.global_batch > SAMPLES_MAX:
        what = f"a batch of {job.global_batch} samples is too large for the sample hash"
        raise InputError(Problem("global_batch", what, f"give at most {SAMPLES_MAX}"))
    architecture = job.model.architecture
    if architecture is not None and architecture.image > 0:
        return _images(job, base, image=architecture.image, channels=architecture.channels)
    if job.data.kind == "images":
        what = f"{job.model.name} is not trained on images"
        raise InputError(Problem("[data] kind", what, "give tokens, or train a vit"))
    if job.data.tokens is not None:
        return open_tokens(
            base / job.data.tokens,
            global_batch=job.global_batch,
            sequence=job.sequence,
            vocabulary=job.model.vocab,
            seed=job.data.seed,
        )
    return SyntheticTokens(job.global_batch, job.sequence, job.model.vocab, job.data.seed)


def _images(job: Job, base: Path, *, image: int, channels: int) -> DataSource:
    data, classes = job.data, job.model.vocab
    if data.kind == "tokens":
        what = f"{job.model.name} is trained on images"
        raise InputError(Problem("[data] kind", what, 'give kind = "images" or "synthetic"'))
    if data.images is None:
        return SyntheticImages(job.global_batch, image, channels, classes, data.seed)
    path = base / data.images
    if path.is_dir():
        folder = open_image_folder(path, image=image, channels=channels, classes=classes)
        return ImageData(folder, job.global_batch, data.seed)
    if data.labels is None:
        what = f"{data.images} is not a folder, and there are no labels beside it"
        raise InputError(Problem("[data] labels", what, "name the array of the images' classes"))
    arrays = open_image_arrays(
        path, base / data.labels, image=image, channels=channels, classes=classes
    )
    return ImageData(arrays, job.global_batch, data.seed)
