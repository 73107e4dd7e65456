"""Opens the data of a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.data.batch import SAMPLES_MAX, DataSource
from worker.data.data_files import place_of
from worker.data.sources.image_data import ImageData, open_image_arrays, open_image_folder
from worker.data.sources.synthetic import SyntheticImages, SyntheticTokens
from worker.data.sources.token_file import open_tokens


@dataclass(frozen=True, slots=True)
class SampleForm:
    """What a model is trained on: tokens of a vocabulary, or images of as many classes."""

    vocabulary: int
    image: int = 0
    """Pixels of an image's side; 0: the samples are tokens."""
    channels: int = 0


def open_data(job: Job, base: Path) -> DataSource:
    """Open the data of a job of a known model; paths are relative to the job file."""
    architecture, vocabulary = job.model.architecture, job.model.vocab
    if architecture is None:
        return open_samples(job, base, SampleForm(vocabulary))
    form = SampleForm(vocabulary, architecture.image, architecture.channels)
    return open_samples(job, base, form)


def open_samples(job: Job, base: Path, form: SampleForm) -> DataSource:
    """Open the data of a job as samples of this form."""
    if job.global_batch > SAMPLES_MAX:
        what = f"a batch of {job.global_batch} samples is too large for the sample hash"
        raise InputError(Problem("global_batch", what, f"give at most {SAMPLES_MAX}"))
    if form.image > 0:
        return _images(job, base, form)
    if job.data.kind == "images":
        what = f"{job.model.name} is not trained on images"
        raise InputError(Problem("[data] kind", what, "give tokens, or train a vit"))
    if job.data.tokens is not None:
        return open_tokens(
            place_of(job, base, job.data.tokens),
            global_batch=job.global_batch,
            sequence=job.sequence,
            vocabulary=form.vocabulary,
            seed=job.data.seed,
        )
    return SyntheticTokens(job.global_batch, job.sequence, form.vocabulary, job.data.seed)


def _images(job: Job, base: Path, form: SampleForm) -> DataSource:
    data, classes, image, channels = job.data, form.vocabulary, form.image, form.channels
    if data.kind == "tokens":
        what = f"{job.model.name} is trained on images"
        raise InputError(Problem("[data] kind", what, 'give kind = "images" or "synthetic"'))
    if data.images is None:
        return SyntheticImages(job.global_batch, image, channels, classes, data.seed)
    path = place_of(job, base, data.images)
    if path.is_dir():
        folder = open_image_folder(path, image=image, channels=channels, classes=classes)
        return ImageData(folder, job.global_batch, data.seed)
    if data.labels is None:
        what = f"{data.images} is not a folder, and there are no labels beside it"
        raise InputError(Problem("[data] labels", what, "name the array of the images' classes"))
    arrays = open_image_arrays(
        path, place_of(job, base, data.labels), image=image, channels=channels, classes=classes
    )
    return ImageData(arrays, job.global_batch, data.seed)
