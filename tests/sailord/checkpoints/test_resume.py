"""A job begins from a checkpoint that somebody names, if it is its own and can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sailord.checkpoints.manifest import load_manifest
from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.resume import begins_from, take_in
from sailord.checkpoints.verify import faults_of
from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from tests.sailord.checkpoints.made import JOB, SPEC, chain, whole_state
from worker.checkpoint.convert import read_checkpoint, write_full

pytestmark = pytest.mark.torch


def begin(folder, resume, *, spec=SPEC):
    return begins_from(read_job(spec), JOB, f"file://{folder}", resume)


def test_without_a_place_there_is_nothing_to_go_on_from():
    assert begins_from(read_job(SPEC), JOB, None, None) is None
    with pytest.raises(InputError, match="names no place"):
        begins_from(read_job(SPEC), JOB, None, "newest")


def test_a_new_job_begins_in_an_empty_place_only(tmp_path):
    assert begin(tmp_path, None) is None
    chain(tmp_path, 10)
    with pytest.raises(InputError, match="holds checkpoints of a job j already"):
        begin(tmp_path, None)


def test_a_place_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/below cannot be made: Not a directory"):
        begin(tmp_path / "file" / "below", None)


def test_where_there_is_none_the_name_is_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"there is no checkpoint at .*/j; give the --id"):
        begin(tmp_path, "newest")


def test_it_goes_on_from_the_step_that_is_named_or_the_newest(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    assert begin(tmp_path, "newest") == second.durable
    assert begin(tmp_path, "10") == first.durable
    with pytest.raises(InputError, match="there are: 10, 20"):
        begin(tmp_path, "15")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden = 16", "hidden = 32"),
        ("max_tp = 2", "max_tp = 4"),
        ("vocab = 61", "vocab = 63"),
        ("max_tp = 2", 'max_tp = 2\noptimizer = "sgd"'),
    ],
)
def test_another_model_is_refused(tmp_path, old, new):
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
def test_other_data_are_refused_before_samples_come_twice_or_never(tmp_path, old, new, told):
    chain(tmp_path, 10)
    assert old in SPEC
    with pytest.raises(InputError, match=f"it was made with {told}"):
        begin(tmp_path, "newest", spec=SPEC.replace(old, new))


def test_how_it_is_trained_from_there_may_be_changed(tmp_path):
    (made,) = chain(tmp_path, 10)
    changed = SPEC.replace("max_tp = 2", "max_tp = 2\nlearning_rate = 0.5\nsteps = 99")
    assert begin(tmp_path, "newest", spec=changed) == made.durable


def test_one_that_is_not_whole_is_refused_with_the_next_older_one(tmp_path):
    chain(tmp_path, 10, 20)
    (tmp_path / "j" / "1-20" / "0-n0.1.snap").unlink()
    with pytest.raises(InputError, match=r"snap is missing; the next older one is of step 10"):
        begin(tmp_path, "newest")


def test_a_newest_one_that_cannot_be_read_is_not_passed_over_in_silence(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    manifest = Path(second.durable.manifest.removeprefix("file://"))
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"step 20 cannot be read: .*; give --resume 10 to go on"):
        begin(tmp_path, "newest")
    with pytest.raises(InputError, match="step 20 cannot be read"):
        begin(tmp_path, "20")
    assert begin(tmp_path, "10") == first.durable


def test_one_file_from_elsewhere_becomes_a_checkpoint(tmp_path):
    whole = whole_state(SPEC, 30)
    write_full(whole, JOB, tmp_path / "whole.snap")
    storage = open_storage(f"file://{tmp_path}/kept")
    durable = take_in(storage, JOB, read_job(SPEC), SPEC, tmp_path / "whole.snap")
    assert begin(tmp_path / "kept", "newest") == durable
    manifest = load_manifest(storage, "j/0-30/manifest-0.json")
    assert faults_of(storage, manifest, job=JOB, is_thorough=True) == []
    assert read_checkpoint(durable.manifest).progress == whole.progress
