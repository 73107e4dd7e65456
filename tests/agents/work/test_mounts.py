"""Data of a job is copied from folders, S3 and Google's buckets."""

from __future__ import annotations

import fsspec
import pytest

from agents.daemon.allowed_uris import ANY, MOUNTS
from agents.work.mounts import MountError, _copy, copy_data, copy_of
from tests.fakes.object_stores import object_stores

ALL = (ANY,)
CONTENT = {"a.txt": b"1", "deep/b.bin": b"\0" * 3_000_000, "deep/er/c": b"3"}


@pytest.fixture(scope="module", autouse=True)
def servers():
    with object_stores():
        yield


@pytest.fixture(params=["file", "s3", "gs"])
def bucket(request, tmp_path):
    place = f"{tmp_path}/data" if request.param == "file" else f"bucket/{tmp_path.name}"
    files = fsspec.filesystem(request.param)
    for name, data in CONTENT.items():
        if request.param == "file":
            files.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{place}/{name}", data)
    return f"{request.param}://{place}"


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_is_copied_with_its_subfolders(bucket, tmp_path, end):
    _copy("data", bucket + end, tmp_path / "copy", ALL)
    found = {
        str(path.relative_to(tmp_path / "copy")): path.read_bytes()
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    }
    assert found == CONTENT


def test_a_single_object_is_copied(bucket, tmp_path):
    _copy("data", f"{bucket}/deep/b.bin", tmp_path / "copy", ALL)
    assert (tmp_path / "copy").read_bytes() == CONTENT["deep/b.bin"]


@pytest.mark.parametrize("missing", ["not-there", "deep/not-there/"])
def test_what_is_missing_is_named(bucket, tmp_path, missing):
    with pytest.raises(MountError, match=f"data x cannot be copied from .*{missing}: "):
        _copy("x", f"{bucket}/{missing}", tmp_path / "copy", ALL)


@pytest.mark.parametrize(
    "uri", ["file:///etc/hostname", "local:///etc", "simplecache::file:///etc", "http://10.0.0.1/x"]
)
async def test_no_file_of_this_machine_is_copied_unless_allowed(tmp_path, uri):
    with pytest.raises(MountError, match=r"data data: .* not where jobs may have data; "):
        await copy_data({"data": uri}, tmp_path / "cache", MOUNTS.default)
    assert not (tmp_path / "cache").exists()


async def test_a_copy_that_is_there_is_used_under_a_shorter_list(tmp_path):
    """An upgrade of the agent must not take the data of a running job away."""
    uri, cache = "gs://bucket/x", tmp_path / "cache"
    cache.mkdir()
    copy_of(cache, uri).write_text("there")
    await copy_data({"data": uri}, cache, ("s3://",))
    with pytest.raises(MountError, match="not where jobs may have data"):
        await copy_data({"data": uri, "more": f"{uri}y"}, cache, ("s3://",))
    assert [each.name for each in cache.iterdir()] == [copy_of(cache, uri).name]
