"""Files of samples that change while a job trains, or before it goes on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import sailor
from simulator.documents.problems import InputError
from simulator.spec.job import Data, Work
from tests.worker.training_runs import alone, small_job
from worker.data.data_files import check_identity, place_of
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.sources.image_data import ImageData, open_image_arrays
from worker.data.sources.open_data import SampleForm, open_data, open_samples
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.models.starting_weights import open_weights
from worker.script.hf_job import hf_recipe
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.trainer import RankTrainer


def of_token_file(folder):
    return open_data(small_job(data=Data(tokens="a.npy")), folder)


def of_script(folder):
    parts = [(sailor.Tokens(folder / "a.npy", 6), 0.5) for _ in range(2)]
    return MapData(sailor.Blend(*parts), default_collate, 2, 0)


def of_images(folder):
    np.save(folder / "a.npy", np.load(folder / "a.npy").astype(np.uint8))
    np.save(folder / "labels.npy", np.zeros(500, dtype=np.int64))
    arrays = open_image_arrays(
        folder / "a.npy", folder / "labels.npy", image=2, channels=1, classes=2
    )
    return ImageData(arrays, 8, 0)


@pytest.fixture
def array(tmp_path):
    file = tmp_path / "a.npy"

    def save(items, seed=0):
        draw = np.random.default_rng(seed)
        np.save(file, draw.integers(0, 30, items).astype(np.uint16))
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("items", "opened"), [(2000, of_token_file), (2000, of_script), ((500, 1, 2, 2), of_images)]
)
def test_file_that_shrinks_is_refused_by_name_instead_of_crashing_the_process(array, items, opened):
    source = opened(array(items))
    source.batch(0, range(2))
    (file, *_) = source.files
    # A mapped file whose end is gone would end the process by a signal.
    os.truncate(file.path, 200)
    with pytest.raises(InputError, match=r"a.npy was changed while the job trains: it has"):
        source.batch(1, range(2))


def test_file_that_is_replaced_or_gone_is_refused(array):
    source = of_token_file(array(2000))
    array(2000, seed=1)
    with pytest.raises(InputError, match=r"a.npy was changed while the job trains; keep the data"):
        source.batch(1, range(2))
    source.files[0].path.unlink()
    with pytest.raises(InputError, match=r"a.npy cannot be read any more: No such file"):
        source.batch(1, range(2))


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        ("", "x.npy 1234 ab", "x.npy: is a file that the job was trained on so far, and is none"),
        ("a.npy 1 a", "a.npy 1 a\nx.npy 2 b", "x.npy: is a file that the job was trained on so"),
        ("y.npy 1 a", "x.npy 1 a", "y.npy: .+: it has 1 bytes, and had another name"),
        ("x y.npy 1000 a", "x y.npy 2 a", "x y.npy: .+: it has 1,000 bytes, and had 2 bytes"),
        ("x.npy 2 b", "x.npy 2 a", "x.npy: is not the file that the job was trained on so far; "),
    ],
    ids=["none", "fewer", "another name", "another size", "another content"],
)
def test_file_that_was_exchanged_is_named(now, before, said):
    with pytest.raises(InputError, match=said):
        check_identity(now, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "seed", "said"),
    [
        (1990, 0, "it has 4,108 bytes, and had 4,128"),
        (2000, 1, "a.npy: is not the file that the job was trained on so far; keep the data"),
        (2000, 0, None),
    ],
    ids=["shorter", "other content", "a copy"],
)
def test_training_goes_on_with_the_same_file_alone(array, items, seed, said):
    def trainer(folder):
        job = small_job(data=Data(tokens="a.npy"))
        data = open_data(job, folder)
        return RankTrainer(job, alone(job), 0, SingleRankTransport(), data)

    first = trainer(array(2000))
    first.step()
    state = merge_ranks([rank_tensors(first.buffers.values())], tensors_of(first.job))
    second = trainer(array(items, seed))
    if said is None:
        second.restore(state, first.progress)
        assert second.progress == first.progress
    else:
        with pytest.raises(InputError, match=said):
            second.restore(state, first.progress)
    first.close()
    second.close()


def test_files_of_a_mount_are_read_from_the_folder_that_a_worker_has_entered(tmp_path, monkeypatch):
    entered, beside = tmp_path / "entered", tmp_path / "beside"
    (entered / "corpus").mkdir(parents=True)
    (entered / "corpus/a.npy").touch()
    monkeypatch.chdir(entered)
    job = small_job(work=Work("", mounts=(("corpus", "gs://bucket/corpus"),)))
    assert place_of(job, beside, "corpus/a.npy") == entered / "corpus/a.npy"
    assert place_of(job, beside, "a.npy") == beside / "a.npy"
    assert place_of(job, beside, "corpus/b.npy") == beside / "corpus/b.npy", "as where it is made"
    assert place_of(small_job(), beside, "corpus/a.npy") == beside / "corpus/a.npy"


OF_TOKENS = Data(tokens="corpus/a.npy")
OF_IMAGES = Data(kind="images", images="corpus/a.npy", labels="corpus/labels.npy")


def open_first(job, base):
    if job.hf is not None:
        hf_recipe(job, base)
    open_weights(job, base)
    open_samples(job, base, SampleForm(30, image=0 if job.data.images is None else 2))


@pytest.mark.parametrize(
    ("opened", "job"),
    [
        ("worker.data.sources.open_data.open_tokens", {"data": OF_TOKENS}),
        ("worker.data.sources.open_data.open_image_arrays", {"data": OF_IMAGES}),
        ("worker.models.starting_weights.open_checkpoint", {"weights": "corpus/a.npy"}),
        ("worker.script.hf_job.hf", {"hf": "corpus/folder"}),
    ],
    ids=["tokens", "images and labels", "weights", "hf"],
)
def test_each_file_that_a_job_names_may_lie_in_a_mount(tmp_path, monkeypatch, opened, job):
    class Opened(Exception):  # noqa: N818 - it ends what is not of interest
        pass

    def refuse(*names, **_):
        raise Opened(*(name for name in names if isinstance(name, str | Path)))

    (tmp_path / "entered/corpus/folder").mkdir(parents=True)
    for name in ("a.npy", "labels.npy"):
        (tmp_path / "entered/corpus" / name).touch()
    monkeypatch.chdir(tmp_path / "entered")
    monkeypatch.setattr(opened, refuse)
    work = Work("", mounts=(("corpus", "gs://bucket/corpus"),))
    given = small_job(work=work, **job)
    with pytest.raises(Opened) as found:
        open_first(given, tmp_path)
    assert found.value.args
    assert all(Path(name).is_relative_to(tmp_path / "entered") for name in found.value.args)
