"""What is wrong with a checkpoint is found, named to the piece, and the next older one offered."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fsspec.implementations.local import LocalFileSystem

from agents.protocol.records import (
    FIRST,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    Point,
    Saving,
    Uploaded,
)
from sailord.checkpoints.catalog import Checkpoints
from sailord.checkpoints.manifest import manifest_bytes, read_manifest
from sailord.checkpoints.object_storage import Storage, StorageError, open_storage
from sailord.checkpoints.verify import compose, faults_of
from sailord.cli.checkpoints import stored
from sailord.cli.main import main
from sailord.core.model.commands import CheckDurable, WriteManifest
from tests.sailord.checkpoints.made import JOB, SPEC, chain, flip, make
from worker.checkpoint.snapshot_file import read_header


def check(folder, durable, *, is_thorough=False, step_max=None):
    job = JobRecord(JOB, "running", saving=Saving(f"file://{folder}"))
    return asyncio.run(Checkpoints(("*",)).check(CheckDurable(job, durable, is_thorough, step_max)))


def faults(folder, made, *, is_thorough=True):
    storage = open_storage(f"file://{folder}")
    return faults_of(storage, made.manifest, job=JOB, is_thorough=is_thorough)


def object_of(folder, step, writer=0):
    return folder / "j" / f"1-{step}" / f"{writer}-n{writer}.1.snap"


def verify(*args):
    return CliRunner().invoke(main, ["checkpoint", "verify", *map(str, args)])


def test_intact_checkpoint_has_no_faults_and_is_chosen(tmp_path):
    *_, newest = chain(tmp_path, 10, 20)
    assert faults(tmp_path, newest) == []
    found = check(tmp_path, newest.durable, is_thorough=True)
    assert (found.found, found.why) == (newest.durable, "")


def test_every_flipped_byte_is_found_and_located(tmp_path):
    (made,) = chain(tmp_path, 10)
    path = object_of(tmp_path, 10)
    header = read_header(path)
    for piece in header.pieces:
        if not piece.bytes:
            continue
        at = piece.offset + piece.bytes // 2
        flip(path, at)
        (fault,) = faults(tmp_path, made)
        assert f"piece {piece.piece} of layer {piece.layer}" in fault
        assert str(path) in fault
        flip(path, at)
    assert faults(tmp_path, made) == []
    flip(path, 100)  # Within the header.
    assert "header" in faults(tmp_path, made, is_thorough=False)[0]


def test_thorough_check_of_a_damaged_checkpoint_falls_back_to_the_older_one(tmp_path):
    chain(tmp_path, 10, 20, 30)
    for step in (20, 30):
        piece = next(p for p in read_header(object_of(tmp_path, step)).pieces if p.bytes)
        flip(object_of(tmp_path, step), piece.offset)
    done = verify("j", "--at", f"file://{tmp_path}", "--json")
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["manifest"].endswith("/j/1-30/manifest-3.json")
    assert len(told["faults"]) == 1
    assert (told["job"], told["step"], told["next_older"]) == ("j", 30, 10)
    assert verify("j", "10", "--at", tmp_path).exit_code == 0
    words = verify("j", "--at", tmp_path).output
    assert ": damaged" in words
    assert " is damaged: its checksum does not match" in words
    assert "the next older intact one: step 10" in words


def test_checkpoint_that_retention_deletes_while_it_is_read_is_not_called_damaged(
    tmp_path, monkeypatch
):
    chain(tmp_path, 10, 20)

    def slow_faults_of(*args, **kwargs):
        for path in sorted((tmp_path / "j" / "1-20").iterdir()):
            path.unlink()
        return faults_of(*args, **kwargs)

    monkeypatch.setattr(stored, "faults_of", slow_faults_of)
    done = verify("j", "--at", f"file://{tmp_path}")
    assert done.exit_code == 2
    assert "damaged" not in done.output
    assert "1-20/manifest-3.json: was deleted while it was read" in done.output
    assert "sailorctl checkpoint pin j STEP" in done.output


def test_restore_falls_back_where_one_bit_of_a_headers_length_is_wrong(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    flip(object_of(tmp_path, 20), 8 + 5)  # 2^40 bytes more.
    found = check(tmp_path, second.durable)
    assert (found.found, found.is_away) == (first.durable, False)
    assert "0-n0.1.snap is damaged: its header cannot have" in found.why


def test_nothing_is_read_beyond_the_end_of_an_object(tmp_path, monkeypatch):
    first, second = chain(tmp_path, 10, 20)
    flip(object_of(tmp_path, 20), 8 + 2)  # 2^16 bytes more.
    read = LocalFileSystem.cat_file

    def refusing(self, path, start=None, end=None, **more):
        if start and start >= self.size(path):
            raise OSError("InvalidRange")
        return read(self, path, start=start, end=end, **more)

    monkeypatch.setattr(LocalFileSystem, "cat_file", refusing)  # As buckets are.
    found = check(tmp_path, second.durable)
    assert (found.found, found.is_away) == (first.durable, False)
    assert "0-n0.1.snap is truncated" in found.why


def falls_back(folder, first, second, why):
    found = check(folder, second.durable)
    assert found.found == first.durable
    assert "step 20 is unreadable" in found.why
    assert why in found.why


def test_checkpoint_of_another_job_is_skipped(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    manifest, _ = manifest_bytes(replace(second.manifest, job=JobId("other")))
    (tmp_path / "j" / "1-20" / "manifest-3.json").write_bytes(manifest)
    falls_back(tmp_path, first, second, "manifest-3.json is not the committed manifest")


def test_restore_falls_back_to_the_older_checkpoint_and_says_why(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    object_of(tmp_path, 20, writer=1).unlink()
    falls_back(tmp_path, first, second, "1-n1.1.snap is missing")


@pytest.mark.parametrize(("step_max", "step"), [(30, 30), (29, 20), (20, 20), (10, 10)])
def test_newest_readable_checkpoint_of_a_step_or_before_is_found(tmp_path, step_max, step):
    *_, newest = chain(tmp_path, 10, 20, 30)
    found = check(tmp_path, newest.durable, step_max=step_max)
    assert found.found is not None
    assert (found.found.point.step, found.step_max) == (step, step_max)


def test_it_is_told_if_no_checkpoint_is_old_enough(tmp_path):
    *_, newest = chain(tmp_path, 10, 20)
    found = check(tmp_path, newest.durable, step_max=9)
    assert found.found is None
    assert found.why.startswith("no readable checkpoint of step 9 or before at file://")


def test_only_a_thorough_check_reads_all_bytes(tmp_path):
    first, second = chain(tmp_path, 10, 20)
    piece = next(p for p in read_header(object_of(tmp_path, 20)).pieces if p.bytes)
    flip(object_of(tmp_path, 20), piece.offset)
    assert check(tmp_path, second.durable).found == second.durable
    assert check(tmp_path, second.durable, is_thorough=True).found == first.durable


def test_damaged_manifest_does_not_hide_older_checkpoints(tmp_path):
    first, second, third = chain(tmp_path, 10, 20, 30)
    for made in (second, third):
        path = tmp_path / "j" / f"1-{made.durable.point.step}" / "manifest-3.json"
        path.write_bytes(path.read_bytes()[:-9])
    found = check(tmp_path, third.durable)
    assert found.found == first.durable
    assert "is truncated or damaged" in found.why


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    (made,) = chain(tmp_path, 10)
    object_of(tmp_path, 10).unlink()
    found = check(tmp_path, made.durable)
    assert found.found is None
    assert not found.is_away
    assert "step 10 is unreadable" in found.why


def test_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    chain(tmp_path, 10)
    (tmp_path / "j" / "1-10" / "manifest-3.json").unlink()
    done = verify("j", "--at", f"file://{tmp_path}")
    assert done.exit_code == 2
    assert "holds unfinished uploads of step 10, and no checkpoint" in done.output
    assert "holds no checkpoint" in verify("other", "--at", f"file://{tmp_path}").output


def test_truncated_object_is_reported_with_both_sizes(tmp_path):
    (made,) = chain(tmp_path, 10)
    path = object_of(tmp_path, 10)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    (fault,) = faults(tmp_path, made, is_thorough=False)
    assert f"{len(data) - 100} bytes instead of" in fault


def test_checkpoint_of_another_job_is_refused(tmp_path):
    (made,) = chain(tmp_path, 10)
    storage = open_storage(f"file://{tmp_path}")
    found = faults_of(storage, made.manifest, job=JobId("k"), is_thorough=False)
    assert found == ["it is a checkpoint of j, not of k"]


def test_object_of_another_model_is_refused(tmp_path):
    make(tmp_path, 10)
    wider = SPEC.replace("hidden = 16", "hidden = 32")
    other = make(tmp_path, 20, spec=wider)
    mixed = replace(other.manifest, model="another")
    assert "is of another model" in faults_of(
        open_storage(f"file://{tmp_path}"), mixed, job=JOB, is_thorough=False
    )[0]  # fmt: skip


def test_missing_and_duplicate_pieces_are_named(tmp_path):
    (made,) = chain(tmp_path, 10)
    first, second = made.manifest.objects
    less = replace(made.manifest, objects=(replace(first, holds=first.holds[1:]), second))
    layer = first.holds[0].layer
    storage = open_storage(f"file://{tmp_path}")
    found = faults_of(storage, less, job=JOB, is_thorough=False)
    assert found == [f"piece {first.holds[0].first} of layer {layer} is in no object"]
    twice = replace(made.manifest, objects=(first, second, first))
    found = faults_of(storage, twice, job=JOB, is_thorough=False)
    assert len(found) == len(first.holds)
    assert "is in 2 objects" in found[0]


def test_changed_manifest_is_detected_by_its_hash(tmp_path):
    (made,) = chain(tmp_path, 10)
    data, _ = manifest_bytes(made.manifest)
    assert read_manifest(data, name="m").point == made.manifest.point
    for at in (b'"step":10', b'"term":3'):
        assert at in data
        changed = data.replace(at, at[:-1] + b"9", 1)
        with pytest.raises(ValueError, match=r"hash|not"):
            read_manifest(changed, name="m")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checksum": "0"}, "is not the uploaded object"),
        ({"holds": (Holding(2, 0, 9),)}, "has no piece . of layer 2"),
        ({"uri": "file:///elsewhere/x.snap"}, "is not directly below"),
        ({"point": Point(11, 1)}, "is not directly below"),
    ],
)
def test_uploads_are_verified_before_the_commit(tmp_path, change, said):
    made = make(tmp_path, 10)
    storage = open_storage(f"file://{tmp_path}")
    order = order_of(storage, made)
    assert compose(storage, order, term=3, spec=SPEC).objects == made.manifest.objects
    wrong = replace(order, parts=(replace(order.parts[0], **change), order.parts[1]))
    with pytest.raises(StorageError, match=said):
        compose(storage, wrong, term=3, spec=SPEC)


def test_uploads_of_a_job_whose_file_cannot_be_used_get_no_manifest(tmp_path):
    made = make(tmp_path, 10)
    storage = open_storage(f"file://{tmp_path}")
    with pytest.raises(StorageError, match=r"the file of j cannot be used: .*a_newer_key"):
        compose(storage, order_of(storage, made), term=3, spec=f"a_newer_key = 1\n{SPEC}")


def order_of(storage, made):
    folder = storage.uri_of("j/1-10")
    parts = tuple(
        Uploaded(made.manifest.point, f"{folder}/{o.name}", o.bytes, o.checksum, o.holds)
        for o in made.manifest.objects
    )
    job = JobRecord(JOB, "running", saving=Saving(storage.uri))
    record = GenerationRecord(JOB, 1, "open", "sha", (), FIRST, 3, "")
    return WriteManifest(job, record, parts, made.manifest.point, None)


@pytest.mark.parametrize("fails", [1, 99], ids=["once", "for ever"])
def test_a_storage_that_fails_makes_no_checkpoint_damaged(tmp_path, monkeypatch, fails):
    """An operator would roll back to the older one, for nothing."""
    chain(tmp_path, 10, 20)
    left, read = [fails], Storage.read

    def read_or_fail(storage, name, *part):
        if left[0] and name.endswith(".snap"):
            left[0] -= 1
            raise StorageError("gs: credentials have expired")
        return read(storage, name, *part)

    monkeypatch.setattr(Storage, "read", read_or_fail)
    done = verify("j", "--at", f"file://{tmp_path}")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), "in words"
    assert "damaged" not in done.output
    assert "could not be read: gs: credentials have expired" in done.output


@pytest.mark.parametrize("damaged", ["manifest-3.json", "0-n0.1.snap"])
def test_restore_falls_back_where_the_medium_of_the_newest_checkpoint_is_damaged(
    tmp_path, monkeypatch, damaged
):
    first, second = chain(tmp_path, 10, 20)
    read = LocalFileSystem.cat_file

    def fails(files, path, *args, **kwargs):
        if path.endswith(f"1-20/{damaged}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(files, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "cat_file", fails)
    found = check(tmp_path, second.durable)
    assert found.found == first.durable
    assert f"{damaged} cannot be read: Input/output error" in found.why
    assert "next older intact one: step 10" in verify("j", "--at", tmp_path).output


def test_storage_whose_server_is_away_says_nothing_about_checkpoints(tmp_path, monkeypatch):
    (made,) = chain(tmp_path, 10)

    def fails(*_, **__):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(LocalFileSystem, "cat_file", fails)
    found = check(tmp_path, made.durable)
    assert (found.found, found.is_away) == (None, True)
