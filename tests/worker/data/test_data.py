"""Batches are functions of the step, whatever their source; invalid files are reported."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents.problems import InputError
from simulator.models.families import build_model
from simulator.spec.job import Data, Job
from worker.data.batch import FIRST_HASH, next_hash
from worker.data.shuffle import sample_numbers
from worker.data.sources.open_data import open_data
from worker.data.sources.token_file import open_tokens
from worker.data.sources.tokenize_text import convert_text

TEXT = build_model("gpt2", layers=1, hidden=8, heads=2, vocab=256, sequence=16)
VISION = build_model("vit", layers=1, hidden=8, heads=2, image=16, patch=8, classes=3)


def job_of(model=TEXT, **data) -> Job:
    return Job(name="job", model=model, global_batch=8, sequence=4, data=Data(**data))


def tokens_job(**data) -> Job:
    return job_of(kind="tokens", tokens="corpus.bin", **data)


def images_job(images="images.npy", labels="labels.npy") -> Job:
    return job_of(VISION, kind="images", images=images, labels=labels)


def write_tokens(folder: Path, tokens, dtype=np.uint16) -> None:
    with (folder / "corpus.bin").open("wb") as file:
        np.save(file, np.asarray(tokens, dtype=dtype))


def write_images(folder: Path, *, count=6) -> None:
    images = np.arange(count * 3 * 16 * 16, dtype=np.int64).reshape(count, 3, 16, 16) % 251
    np.save(folder / "images.npy", images.astype(np.uint8))
    np.save(folder / "labels.npy", np.arange(count) % 3)


def problem_of(job: Job, folder: Path) -> str:
    with pytest.raises(InputError) as told:
        open_data(job, folder).batch(0, range(8))
    return str(told.value)


# -- any source -----------------------------------------------------------------------------------


@pytest.fixture(params=["synthetic text", "synthetic images", "tokens", "images"])
def source(request, tmp_path):
    write_tokens(tmp_path, np.arange(203) % 256)
    write_images(tmp_path)
    jobs = {
        "synthetic text": job_of(),
        "synthetic images": job_of(VISION),
        "tokens": tokens_job(),
        "images": images_job(),
    }
    return jobs[request.param], tmp_path


def test_batch_is_the_same_in_parts_repeated_and_reopened(source):
    job, folder = source
    data = open_data(job, folder)
    whole = data.batch(5, range(8))
    for positions in ([0, 1, 2], [7], [4, 3]):
        for other in (data, open_data(job, folder)):
            piece = other.batch(5, positions)
            assert torch.equal(piece.inputs, whole.inputs[positions])
            assert torch.equal(piece.labels, whole.labels[positions])
            assert torch.equal(piece.digests, whole.digests[positions])
    assert not torch.equal(data.batch(6, range(8)).inputs, whole.inputs)


def test_seed_changes_the_order(source):
    job, folder = source
    other = replace(job, data=replace(job.data, seed=1))
    batches = [open_data(each, folder).batch(0, range(8)) for each in (job, other)]
    assert not torch.equal(batches[0].inputs, batches[1].inputs)


def test_labels_are_next_tokens_or_classes(source):
    job, folder = source
    batch = open_data(job, folder).batch(0, range(8))
    assert batch.labels.dtype == torch.int64
    if job.model is TEXT:
        assert batch.inputs.shape == batch.labels.shape == (8, 4)
        assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])
        assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < 256
    else:
        assert batch.inputs.shape == (8, 3, 16, 16)
        assert batch.inputs.dtype == torch.float32
        assert float(batch.inputs.abs().max()) <= 1.5
        assert set(batch.labels.tolist()) <= {0, 1, 2}


# -- order ----------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 300), batch=st.integers(1, 50), seed=st.integers(0, 2**40), data=st.data()
)
def test_every_sample_occurs_once_per_epoch(count, batch, seed, data):
    epochs = data.draw(st.integers(1, 3))
    steps = -(-count * epochs // batch)
    order = np.concatenate(
        [
            sample_numbers(s, range(batch), global_batch=batch, count=count, seed=seed)
            for s in range(steps)
        ]
    )
    for epoch in range(epochs):
        taken = order[epoch * count : (epoch + 1) * count]
        assert sorted(taken.tolist()) == list(range(count))


def test_epochs_are_shuffled_differently():
    first, second = (
        sample_numbers(epoch, range(100), global_batch=100, count=100, seed=0) for epoch in (0, 1)
    )
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(100))


def test_exchanged_samples_change_the_hash(tmp_path):
    data = open_data(job_of(), tmp_path)
    digests = data.batch(3, range(8)).digests
    assert 0 <= int(digests.min()) <= int(digests.max()) < 2**32
    assert len(set(digests.tolist())) == 8
    # The same content at another position or step has another digest.
    one = replace(job_of(), global_batch=1)
    moved = open_data(one, tmp_path)
    assert torch.equal(moved.batch(8, [0]).inputs, moved.batch(7, [1]).inputs)
    assert not torch.equal(moved.batch(8, [0]).digests, moved.batch(7, [1]).digests)


def test_hash_covers_all_steps():
    once = next_hash(FIRST_HASH, step=0, digest_sum=5)
    assert len(once) == len(FIRST_HASH)
    assert once != next_hash(FIRST_HASH, step=0, digest_sum=6)
    assert next_hash(once, step=1, digest_sum=5) != next_hash(FIRST_HASH, step=1, digest_sum=5)


# -- files of tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_samples_are_consecutive_pieces_of_the_text(tmp_path, dtype):
    write_tokens(tmp_path, np.arange(33), dtype)
    batch = open_data(tokens_job(), tmp_path).batch(0, range(8))
    assert sorted(batch.inputs[:, 0].tolist()) == list(range(0, 32, 4))
    assert torch.equal(batch.labels, batch.inputs + 1)


@pytest.mark.slow
def test_invalid_token_files_are_reported(tmp_path):
    job = tokens_job()
    assert problem_of(job, tmp_path) == (
        f"corpus.bin: {tmp_path / 'corpus.bin'} cannot be read: No such file or directory; "
        "name an existing file"
    )
    write_tokens(tmp_path, [*range(40), 256, 300])
    assert problem_of(job, tmp_path) == (
        "corpus.bin: token 40 is 256, outside the model's vocabulary of 256; "
        "convert the text with the model's own vocabulary, or train a model of a larger one"
    )
    write_tokens(tmp_path, range(4))
    assert "holds 4 tokens, fewer than the 5 of one sample" in problem_of(job, tmp_path)
    write_tokens(tmp_path, np.arange(40), np.float32)
    assert "not a row of uint16 or uint32" in problem_of(job, tmp_path)
    (tmp_path / "corpus.bin").write_text("Once upon a time")
    assert "convert-tokens" in problem_of(job, tmp_path)
    (tmp_path / "corpus.bin").unlink()
    (tmp_path / "corpus.bin").mkdir()
    assert "Is a directory" in problem_of(job, tmp_path)


@pytest.mark.parametrize("size", [0, 3, 9, 60, 127, 129, 200])
def test_truncated_file_is_reported(tmp_path, size):
    write_tokens(tmp_path, np.arange(40))
    whole = (tmp_path / "corpus.bin").read_bytes()
    (tmp_path / "corpus.bin").write_bytes(whole[:size])
    told = problem_of(tokens_job(), tmp_path)
    assert "truncated" in told if size >= 6 else "not an array" in told


def test_unchecked_invalid_token_is_reported_when_it_is_read(tmp_path):
    write_tokens(tmp_path, [*range(32), 300])
    sizes = {"global_batch": 8, "sequence": 4, "vocabulary": 256, "seed": 0}
    data = open_tokens(tmp_path / "corpus.bin", checked=16, **sizes)
    with pytest.raises(InputError, match="token 32 is 300"):
        data.batch(0, range(8))


# -- from text to tokens --------------------------------------------------------------------------


def test_without_a_vocabulary_bytes_are_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße\n", encoding="utf-8")
    assert convert_text(tmp_path / "a.txt", tmp_path / "corpus.bin") == 8
    assert np.load(tmp_path / "corpus.bin").tolist() == list("Grüße\n".encode())
    assert open_data(tokens_job(), tmp_path).batch(0, [0]).inputs.tolist() == [[71, 114, 195, 188]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.txt", "corpus.bin"]


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_byte_images_are_scaled_to_minus_one_to_one(tmp_path, channels_last):
    write_images(tmp_path)
    if channels_last:
        images = np.load(tmp_path / "images.npy").transpose(0, 2, 3, 1)
        np.save(tmp_path / "images.npy", images)
    batch = open_data(images_job(), tmp_path).batch(0, range(6))
    first = batch.inputs[batch.inputs[:, 0, 0, 0] == -1.0]
    assert len(first) == 1, "the first image alone begins with byte 0"
    assert first[0, 0, 0, :3].tolist() == pytest.approx([-1.0, 1 / 127.5 - 1, 2 / 127.5 - 1])


@pytest.mark.slow
def test_invalid_images_are_reported(tmp_path):
    write_images(tmp_path)
    assert "there are no labels" in problem_of(images_job(labels=None), tmp_path)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 0, 3, 1]))
    assert "image 4 is of class 3, but the model has 3" in problem_of(images_job(), tmp_path)
    np.save(tmp_path / "labels.npy", np.zeros(5, dtype=int))
    assert "not a class for each" in problem_of(images_job(), tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((6, 3, 8, 8), dtype=np.uint8))
    assert "the model's images are (3, 16, 16)" in problem_of(images_job(), tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((6, 3, 16, 16)))
    assert "bytes or 32-bit floats" in problem_of(images_job(), tmp_path)


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return an image file of these chunks."""
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts])


def png_size(pixels: int) -> tuple[bytes, bytes]:
    """Return the first chunk of a square image."""
    return b"IHDR", struct.pack(">IIBBBBB", pixels, pixels, 8, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([png_size(20_000), (b"IDAT", b"")], "Image size (400000000 pixels) exceeds limit"),
        (
            [png_size(8), (b"zTXt", b"x\0\0" + zlib.compress(bytes(2**21))), (b"IDAT", b"")],
            "Decompressed data too large",
        ),
    ],
    ids=["too large", "text too large"],
)
def test_image_that_pillow_does_not_read_is_named(tmp_path, chunks, said):
    pytest.importorskip("PIL.Image")
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "0.png").write_bytes(png_of(*chunks))
    told = problem_of(images_job("pets", None), tmp_path)
    assert f"cat/0.png cannot be read as an image: {said}" in told
    assert "remove or replace it" in told


def test_image_folder_has_one_subfolder_per_class(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["cat", "dog"]):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for shade in (0, 255):
            picture = pillow.new("L", (20 + number, 10), shade)
            picture.save(tmp_path / "pets" / name / f"{shade}.png")
    job = images_job("pets", None)
    batch = open_data(job, tmp_path).batch(0, range(4))
    assert batch.inputs.shape == (4, 3, 16, 16)
    shades = zip(batch.labels.tolist(), batch.inputs.mean((1, 2, 3)).tolist(), strict=True)
    assert sorted(shades) == [(0, -1.0), (0, 1.0), (1, -1.0), (1, 1.0)]
    (tmp_path / "pets" / "cat" / "0.png").write_text("no image")
    assert "cannot be read as an image" in problem_of(job, tmp_path)
    assert "no folders with images" in problem_of(images_job("pets/dog", None), tmp_path)


def test_wrong_kind_of_data_is_reported(tmp_path):
    write_tokens(tmp_path, range(40))
    assert "is trained on images" in problem_of(replace(tokens_job(), model=VISION), tmp_path)
    assert "is not trained on images" in problem_of(replace(images_job(), model=TEXT), tmp_path)
