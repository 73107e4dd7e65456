"""A job resumes from a named checkpoint if that belongs to it and is readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from sailord.checkpoints.manifest import load_manifest
from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.resume import JobStart, job_start, take_in
from sailord.checkpoints.verify import faults_of
from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import (
    JOB,
    SPEC,
    chain,
    make,
    read_full,
    whole_state,
    write_full,
)


def begin(folder, resume, *, spec=SPEC):
    return beginning(folder, resume, spec=spec).durable


def beginning(folder, resume, *, spec=SPEC):
    return job_start(read_job(spec), JOB, f"file://{folder}", resume)


def test_resume_without_checkpoint_storage_is_refused():
    assert job_start(read_job(SPEC), JOB, None, None) == JobStart()
    with pytest.raises(InputError, match="no checkpoint storage"):
        job_start(read_job(SPEC), JOB, None, "newest")


def test_new_job_needs_a_storage_without_checkpoints_of_its_id(tmp_path):
    assert begin(tmp_path, None) is None
    chain(tmp_path, 10)
    with pytest.raises(InputError, match="already has checkpoints of a job j"):
        begin(tmp_path, None)


def test_unreadable_checkpoints_of_its_id_are_in_a_new_jobs_way_too(tmp_path):
    """A newer version may have written them; retention would delete them."""
    (made,) = chain(tmp_path, 10)
    manifest = Path(made.durable.manifest.removeprefix("file://"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(InputError, match="has format 2"):
        begin(tmp_path, "newest")
    with pytest.raises(InputError, match="already has checkpoints of a job j"):
        begin(tmp_path, None)


def test_storage_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/below/j cannot be listed: Not a directory"):
        begin(tmp_path / "file" / "below", None)


def test_resume_without_a_checkpoint_asks_for_the_id(tmp_path):
    with pytest.raises(InputError, match=r"no checkpoint at .*/j; use the job's former --id"):
        begin(tmp_path, "newest")


def test_resume_takes_the_requested_step_or_the_newest(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    assert begin(tmp_path, "newest") == second.durable
    assert begin(tmp_path, "10") == first.durable
    with pytest.raises(InputError, match="existing steps: 10, 20"):
        begin(tmp_path, "15")


@pytest.mark.parametrize("resumed", ["newest", "600"])
def test_checkpoints_of_a_new_store_are_newer_than_those_of_the_lost_one(tmp_path, resumed):
    make(tmp_path, 600, generation=5)
    lost = make(tmp_path, 700, generation=7)
    (tmp_path / "j" / "8-720").mkdir()
    (tmp_path / "j" / "8-720" / "0-n0.1.snap").write_bytes(b"unfinished")
    begun = beginning(tmp_path, resumed)
    assert begun.durable.point.step == (700 if resumed == "newest" else 600)
    assert begun.generations_before == 8
    child = make(tmp_path, 650, generation=begun.generations_before + 1, parent=begun.durable)
    assert child.durable != lost.durable
    assert begin(tmp_path, "newest") == child.durable


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden = 16", "hidden = 32"),
        ("max_tp = 2", "max_tp = 4"),
        ("vocab = 61", "vocab = 63"),
        ("max_tp = 2", 'max_tp = 2\noptimizer = "sgd"'),
    ],
)
def test_resume_with_another_model_is_refused(tmp_path, old, new):
    chain(tmp_path, 10)
    with pytest.raises(InputError, match="the model was changed since step 10"):
        begin(tmp_path, "newest", spec=SPEC.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("max_tp = 2", 'max_tp = 2\noptimizer = "adam"', "optimizer = adamw, and the job has adam"),
        ("global_batch = 8", "global_batch = 16", "global_batch = 8, and the job has 16"),
        ("8\nsequence = 8", "8\nsequence = 4", "sequence = 8, and the job has 4"),
        ("[training]", "[data]\nseed = 7\n[training]", r"\[data\] seed = 0, and the job has 7"),
        (
            "[training]",
            '[data]\nkind = "tokens"\ntokens = "/other"\n[training]',
            r"\[data\] kind = 'synthetic', and the job has 'tokens'",
        ),
    ],
    ids=["optimizer", "batch", "sequence", "seed", "data"],
)
def test_resume_with_other_data_is_refused(tmp_path, old, new, told):
    chain(tmp_path, 10)
    assert old in SPEC
    with pytest.raises(InputError, match=f"it was made with {told}"):
        begin(tmp_path, "newest", spec=SPEC.replace(old, new))


def test_resume_may_change_training_options(tmp_path):
    (made,) = chain(tmp_path, 10)
    changed = SPEC.replace("max_tp = 2", "max_tp = 2\nlearning_rate = 0.5\nsteps = 99")
    assert begin(tmp_path, "newest", spec=changed) == made.durable


def test_incomplete_checkpoint_is_refused_and_the_older_one_named(tmp_path):
    chain(tmp_path, 10, 20)
    (tmp_path / "j" / "1-20" / "0-n0.1.snap").unlink()
    with pytest.raises(InputError, match=r"snap is missing; the next older one is step 10"):
        begin(tmp_path, "newest")


def test_unreadable_newest_checkpoint_is_an_error(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    manifest = Path(second.durable.manifest.removeprefix("file://"))
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"step 20 is unreadable: .*; use --resume 10 to start"):
        begin(tmp_path, "newest")
    with pytest.raises(InputError, match="step 20 is unreadable"):
        begin(tmp_path, "20")
    assert begin(tmp_path, "10") == first.durable


def test_imported_file_becomes_a_checkpoint(tmp_path):
    whole = whole_state(SPEC, 30)
    write_full(whole, JOB, tmp_path / "whole.snap")
    storage = open_storage(f"file://{tmp_path}/kept")
    durable = take_in(storage, JOB, read_job(SPEC), SPEC, tmp_path / "whole.snap")
    assert begin(tmp_path / "kept", "newest") == durable
    manifest = load_manifest(storage, "j/0-30/manifest-0.json")
    assert faults_of(storage, manifest, job=JOB, is_thorough=True) == []
    assert read_full(durable.manifest).progress == whole.progress
