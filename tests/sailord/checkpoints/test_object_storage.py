"""An error of checkpoint storage says what failed, where, and why."""

from __future__ import annotations

import errno
import os

import pytest

from sailord.checkpoints.object_storage import (
    Away,
    Damaged,
    Missing,
    StorageError,
    _convert,
    open_storage,
)
from simulator.documents.problems import InputError


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("checkpoints", "is a relative path"),
        ("nope://bucket/x", "Protocol not known"),
        ("az://bucket/x", "needs adlfs, which is not installed; pip install adlfs"),
    ],
)
def test_invalid_uri_is_refused_before_anything_runs(uri, said):
    with pytest.raises(InputError, match=said):
        open_storage(uri)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_object_is_written_completely_or_not_at_all(tmp_path, scheme):
    storage = open_storage(f"{scheme}://{tmp_path}/deep")
    storage.write("j/1-10/a", b"abcdef")
    assert storage.read("j/1-10/a") == b"abcdef"
    assert storage.read("j/1-10/a", 2, 4) == b"cd"
    assert storage.size("j/1-10/a") == 6
    assert [(e.name, e.bytes) for e in storage.entries("j")] == [("1-10/a", 6)]
    assert storage.entries("other") == []
    storage.delete("j/1-10/a")
    storage.delete("j/1-10/a")
    assert storage.entries("j") == []
    with pytest.raises(Missing, match="j/1-10/a does not exist"):
        storage.read("j/1-10/a")


def test_existing_object_is_never_overwritten(tmp_path):
    storage = open_storage(f"memory://{tmp_path}/once")
    storage.write("j/1-10/a", b"abcdef")
    storage.write("j/1-10/a", b"abcdef")
    with pytest.raises(StorageError, match="another object has that name already"):
        storage.write("j/1-10/a", b"other")
    assert storage.read("j/1-10/a") == b"abcdef"


def test_partial_object_of_an_earlier_attempt_is_replaced(tmp_path):
    storage = open_storage(f"memory://{tmp_path}/half")
    storage.write("j/1-10/a", b"abc")
    with pytest.raises(StorageError, match="incomplete object had that name"):
        storage.write("j/1-10/a", b"abcdef")
    storage.write("j/1-10/a", b"abcdef")
    assert storage.read("j/1-10/a") == b"abcdef"


@pytest.mark.parametrize(
    ("uri", "error", "kind", "said"),
    [
        ("file:///x", OSError(errno.ENOSPC, "x"), StorageError, "the storage is full"),
        ("file:///x", OSError(errno.EDQUOT, "x"), StorageError, "the quota is used up"),
        ("file:///x", OSError(errno.EROFS, "x"), StorageError, "the file system is read-only"),
        ("file:///x", PermissionError(errno.EACCES, "x"), StorageError, "permission is missing"),
        ("file:///x", OSError(errno.EIO, "x"), Damaged, os.strerror(errno.EIO)),
        ("file:///x", OSError(errno.ENOTCONN, "x"), Away, os.strerror(errno.ENOTCONN)),
        ("file:///x", OSError(errno.ESTALE, "x"), Away, os.strerror(errno.ESTALE)),
        ("s3://b", PermissionError("Access Denied"), Away, "AWS_ACCESS_KEY_ID"),
        ("s3://b", Exception("Unable to locate credentials"), Away, "AWS_ACCESS_KEY_ID"),
        ("gs://b", Exception("Anonymous caller, 401"), Away, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://b", Exception("the host is not known"), Away, "the host is not known"),
    ],
)
def test_backend_error_becomes_a_message_with_place_and_cause(uri, error, kind, said):
    told = _convert(f"{uri}/o", "written", uri, error)
    assert type(told) is kind
    assert said in str(told)
    assert f"{uri}/o cannot be written" in str(told)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_read_only_folder_is_named_in_the_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission is missing"):
        open_storage(f"file://{tmp_path}").write("a/b", b"")


def test_failed_write_leaves_no_file(tmp_path):
    storage = open_storage(f"file://{tmp_path}")
    (tmp_path / "j").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="cannot be written"):
        storage.write("j/1-10/a", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_a_file_in_place_of_the_folder_is_no_empty_folder(tmp_path):
    (tmp_path / "kept").write_bytes(b"")
    with pytest.raises(StorageError, match="kept/j cannot be listed: Not a directory"):
        open_storage(f"file://{tmp_path}/kept").entries("j")
