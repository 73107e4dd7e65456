"""Objects are written once, to real file systems and by the real clients of S3 and Google's store.

The S3 server is moto's; Google's is ours (``tests/fakes/gcs.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from agents.object_store import ObjectContent, write_once
from sailord.checkpoints.object_storage import Missing, StorageError, open_storage
from tests.fakes.gcs import FakeGcs
from tests.fakes.object_stores import object_stores

LARGE = os.urandom(11 * 2**20)
"""More than two parts of an upload."""
STORES = ("file", "memory", "s3", "gs")
OBJECT_STORES = ("memory", "s3", "gs")


@pytest.fixture(scope="module")
def gcs() -> Iterator[FakeGcs]:
    with object_stores() as server:
        yield server


@pytest.fixture
def uri(request, gcs, tmp_path: Path) -> str:
    """Return a place of its own in the store that the test names."""
    del gcs
    place = {"file": str(tmp_path), "memory": str(tmp_path)}
    return f"{request.param}://{place.get(request.param, f'bucket/{tmp_path.name}')}"


on_all = pytest.mark.parametrize("uri", STORES, indirect=True)
on_object_stores = pytest.mark.parametrize("uri", OBJECT_STORES, indirect=True)


@on_all
def test_storage_keeps_what_is_written(uri):
    storage = open_storage(uri)
    for name, data in (("empty", b""), ("small", b"abcdef"), ("large", LARGE)):
        storage.write(f"j/1-10/{name}", data)
        assert storage.read(f"j/1-10/{name}") == data
        assert storage.size(f"j/1-10/{name}") == len(data)
    assert storage.read("j/1-10/small", 2, 4) == b"cd"
    assert storage.read("j/1-10/large", len(LARGE) - 2, len(LARGE) + 5) == LARGE[-2:]
    found = [(entry.name, entry.bytes) for entry in storage.entries("j")]
    assert found == [("1-10/empty", 0), ("1-10/large", len(LARGE)), ("1-10/small", 6)]
    assert storage.entries("other") == []
    storage.delete("j/1-10/small")
    storage.delete("j/1-10/small")
    assert [entry.name for entry in storage.entries("j")] == ["1-10/empty", "1-10/large"]
    with pytest.raises(Missing, match="j/1-10/small does not exist"):
        storage.read("j/1-10/small")


@on_all
@pytest.mark.parametrize("data", [b"abcdef", LARGE], ids=["small", "large"])
def test_an_object_is_never_overwritten(uri, data):
    storage, other = open_storage(uri), b"other" + data
    storage.write("taken", data)
    storage.write("taken", data)
    with pytest.raises(StorageError, match="another object has that name already"):
        storage.write("taken", other)
    assert storage.read("taken") == data


@on_object_stores
@pytest.mark.parametrize("size", [0, 3, 6 * 2**20])
def test_the_beginning_of_an_object_is_replaced(uri, size):
    storage = open_storage(uri)
    storage.write("begun", LARGE[:size])
    with pytest.raises(StorageError, match="incomplete object had that name"):
        storage.write("begun", LARGE)
    storage.write("begun", LARGE)
    assert storage.read("begun") == LARGE


class ReadError(Exception):
    """The file that is being uploaded cannot be read."""


@on_object_stores
@pytest.mark.parametrize("size", [100, 7 * 2**20], ids=["first part", "second part"])
def test_an_upload_that_fails_leaves_nothing(uri, size, gcs):
    def chunks() -> Iterator[bytes]:
        yield LARGE[:size]
        raise ReadError

    storage, before = open_storage(uri), gcs.begun
    files, root = fsspec.core.url_to_fs(uri)
    with pytest.raises(ReadError):
        write_once(files, f"{root}/failed", ObjectContent(chunks, len(LARGE), LARGE[:64]))
    assert storage.entries("") == []
    assert gcs.begun == before
    storage.write("failed", LARGE)
    assert storage.read("failed") == LARGE


@pytest.mark.parametrize("uri", ["gs"], indirect=True)
@pytest.mark.parametrize("data", [b"0123456789", LARGE], ids=["small", "large"])
def test_of_writers_at_once_one_succeeds(uri, data):
    """The others are told so. (The S3 server of moto compares and writes in two steps.)"""
    together, succeeded, failed = threading.Barrier(4), [], []

    def write(mine: bytes) -> None:
        storage = open_storage(uri)
        together.wait()
        try:
            storage.write("raced", mine)
        except StorageError as error:
            failed.append(str(error))
        else:
            succeeded.append(mine)

    writers = [threading.Thread(target=write, args=(bytes([n]) + data,)) for n in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    (winner,) = succeeded
    assert open_storage(uri).read("raced") == winner
    assert all("another object has that name" in told for told in failed), failed


@pytest.mark.slow
def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(gcs):
    storage = open_storage("gs://bucket/overloaded")
    gcs.refuses = 2
    storage.write("a", b"abc")
    assert gcs.refuses == 0
    assert storage.read("a") == b"abc"


@pytest.mark.usefixtures("gcs")
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_that_does_not_exist_is_named_and_not_made(scheme):
    storage = open_storage(f"{scheme}://no-such-bucket/x")
    for _ in range(2):
        with pytest.raises(StorageError, match=f"{scheme}://no-such-bucket/x/a"):
            storage.write("a", b"abc")
