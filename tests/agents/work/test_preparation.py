"""A node prepares for the job that runs, and reports when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from agents.protocol.records import PREPARING, JobId, JobRecord, NodeId
from agents.work import preparation as module
from agents.work.fetch import FetchError
from agents.work.mounts import MountError, link
from agents.work.package import PART_BYTES, Package, package_of
from agents.work.work_folder import KEPT, SETUP, WorkFolder, delete_old
from tests.agents.work.preparing import JOB, RUNNING, Node, packed


async def test_a_package_comes_from_a_node_if_the_leader_does_not_have_it(
    tmp_path, sources, fetcher
):
    archive = packed(tmp_path, big=os.urandom(2 * PART_BYTES))
    package = package_of(archive)
    assert package.parts == 3
    sources.packages = {"leader:1": {}, "other:1": {str(package): archive}}
    path = await fetcher.fetch(package)
    assert path.read_bytes() == archive.read_bytes()
    assert [a for a, _ in sources.asked] == ["leader:1", *["other:1"] * 3]
    await fetcher.fetch(package)
    assert len(sources.asked) == 4, "it is there already"


async def test_a_package_that_differs_from_its_name_is_not_kept(tmp_path, sources, fetcher):
    archive = packed(tmp_path, train=b"1")
    package = Package("0" * 64, archive.stat().st_size)
    sources.packages = {"leader:1": {str(package): archive}}
    with pytest.raises(FetchError, match="differs from its name"):
        await fetcher.fetch(package)
    assert list(fetcher.folder.iterdir()) == []


async def test_a_package_that_the_disk_has_damaged_is_fetched_again(tmp_path, sources, fetcher):
    archive = packed(tmp_path, train=b"1")
    package = package_of(archive)
    sources.packages = {"leader:1": {str(package): archive}}
    path = await fetcher.fetch(package)
    path.write_bytes(bytes(package.size))
    assert package_of(await fetcher.fetch(package)) == package


async def test_a_package_that_no_one_has_is_named_with_the_last_reason(sources, fetcher):
    sources.packages = {"leader:1": {}}
    with pytest.raises(FetchError, match=r"cannot be fetched: other:1.*refused"):
        await fetcher.fetch(Package("0" * 64, 1))


@pytest.fixture
def node(tmp_path, fetcher):
    return Node(tmp_path / "node", fetcher)


async def test_a_job_without_a_work_folder_needs_nothing(node):
    node.text = "[model]\n"
    with contextlib.closing(node.preparation):
        assert await node.preparation.view(JOB) == {}
    assert node.told.empty()


async def test_the_work_folder_is_unpacked_once_and_kept_over_a_restart(
    tmp_path, node, sources, fetcher
):
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        view = await node.preparation.view(JOB)
    folder = Path(view["folder"])
    assert (folder / "train").read_bytes() == b"print()"
    (folder / "written").touch()
    again = Node(tmp_path / "node", fetcher)
    again.job(archive)
    os.utime(folder.parent, (1, 1))
    with contextlib.closing(again.preparation):
        assert await again.preparation.view(JOB) == view
    assert folder.parent.stat().st_mtime > 1, "the oldest are deleted first"
    assert (folder / "written").exists(), "it was not unpacked again"
    assert len(sources.asked) == 1


async def test_a_folder_whose_preparation_was_cut_off_is_made_anew(
    tmp_path, node, sources, fetcher
):
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    with contextlib.closing(node.preparation):
        folder = Path((await node.preparation.view(JOB))["folder"])
    (folder.parent / "ready").unlink()
    (folder / "train").write_bytes(b"half")
    again = Node(tmp_path / "node", fetcher)
    again.job(archive)
    with contextlib.closing(again.preparation):
        await again.preparation.view(JOB)
    assert (folder / "train").read_bytes() == b"print()"


def test_commands_of_an_attempt_whose_agent_was_killed_end_before_the_next(tmp_path):
    folder, other = WorkFolder(tmp_path / "one"), WorkFolder(tmp_path / "other")
    running = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, SETUP: str(each.home)})
        for each in (folder, other)
    ]
    try:
        folder.begin()
        assert running[0].poll() is not None
        assert running[1].poll() is None, "another folder's"
    finally:
        for each in running:
            each.kill()
            each.wait()


async def test_a_node_without_the_package_is_unfit_until_it_gets_it(tmp_path, node, sources):
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        why = await node.preparation.view(JOB)
        assert isinstance(why, str)
        assert "cannot be fetched" in why
        assert await node.told.get() == why
        sources.packages = {"leader:1": {str(package_of(archive)): archive}}
        assert await node.told.get() == ""
        assert isinstance(await node.preparation.view(JOB), dict)


async def test_a_long_preparation_makes_the_node_unfit_until_it_is_done(
    tmp_path, node, sources, monkeypatch
):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        assert await node.told.get() == "its work folder is being prepared"
        assert await node.told.get() == ""


async def test_preparation_of_another_job_clears_the_problems_of_the_last(node):
    node.text = '[work]\npackage = "' + "0" * 64 + '-1"\n'
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        assert await node.told.get()
        node.preparation.look({})
        assert await node.told.get() == ""


async def test_failing_setup_is_reported_once_and_retried(tmp_path, node, sources):
    archive = packed(tmp_path, train=b"print()")
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    count = tmp_path / "count"
    fails_twice = f"echo x >> {count}; wc -l < {count}; test $(wc -l < {count}) -gt 2"
    node.job(archive, setup=["true", fails_twice])
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        said = [await node.told.get()]
        while said[-1]:
            said.append(await node.told.get())
        failure = f"setup `{fails_twice}` exited with 1: 1"
        assert [each for each in said if each != PREPARING] == [failure, ""]
        view = await node.preparation.view(JOB)
        assert isinstance(view, dict)
        assert node.preparation.log.read_text().count("$ true") == 1, "of the last attempt"
    again = Node(tmp_path / "node", node.preparation.fetcher)
    again.text = node.text
    with contextlib.closing(again.preparation):
        assert await again.preparation.view(JOB) == view
    assert count.read_text() == "x\n" * 3, "a setup that succeeded is not run again"


async def test_newest_kind_of_failure_is_reported_and_a_repeated_one_once(
    tmp_path, node, sources, monkeypatch
):
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    fails: list[Exception] = [
        FetchError("the package cannot be fetched: a:1 refused"),
        FetchError("the package cannot be fetched: b:2 refused"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a"),
        OSError(errno.EROFS, os.strerror(errno.EROFS), "/a"),
    ]
    real = module.unpack

    def write(*args: Any) -> None:
        if fails:
            raise fails.pop(0)
        real(*args)

    monkeypatch.setattr(module, "FETCH_AGAIN_S", 0.01)
    monkeypatch.setattr(module, "unpack", write)
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        said = [await node.told.get()]
        while said[-1]:
            said.append(await node.told.get())
    assert [each for each in said if each != PREPARING] == [
        "the package cannot be fetched: a:1 refused",
        "/a: No space left on device; free room there",
        "/a: Read-only file system",
        "",
    ]


async def test_a_full_disk_is_named(tmp_path, node, sources, monkeypatch):
    archive = packed(tmp_path, train=b"print()")
    node.job(archive)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "unpack", write)
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        told = await node.told.get()
    assert told == f"{tmp_path / 'node'}: No space left on device; free room there"


async def test_a_node_tries_at_once_when_a_held_job_is_resumed(
    tmp_path, node, sources, monkeypatch
):
    monkeypatch.setattr(module, "FETCH_AGAIN_S", 3600.0)
    archive = packed(tmp_path, train=b"print()")
    node.preparation.retry_s = 3600.0
    node.job(archive)
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        assert "cannot be fetched" in await node.told.get()
        sources.packages = {"leader:1": {str(package_of(archive)): archive}}
        asked = len(sources.asked)
        for state in ("running", "held", "held"):
            node.preparation.look({JOB: JobRecord(JOB, state)})
        assert len(sources.asked) == asked
        node.preparation.look(RUNNING)
        assert await node.told.get() == PREPARING, "no plan uses it before it is ready"
        assert await node.told.get() == ""


async def test_nothing_that_a_job_brings_ends_the_agent(tmp_path, node, sources):
    archive = tmp_path / "packed"
    archive.write_bytes(gzip.compress(b"x" * 2000)[:-20] + b"y" * 20)
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    node.job(archive)
    with contextlib.closing(node.preparation):
        assert "is damaged" in await node.preparation.view(JOB)


async def test_any_failure_is_reported_and_retried(tmp_path, node, sources, monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("a surprise")

    node.job(packed(tmp_path, train=b"print()"))
    with contextlib.closing(node.preparation), monkeypatch.context() as patched:
        patched.setattr(module, "work_of", fails)
        node.preparation.look(RUNNING)
        assert await node.preparation.view(JOB) == await node.told.get() == "a surprise"
        patched.undo()
        sources.packages = {"leader:1": {str(package_of(tmp_path / "packed")): tmp_path / "packed"}}
        while await node.told.get():
            pass
        assert isinstance(await node.preparation.view(JOB), dict)


async def test_a_copy_that_runs_on_after_its_cancellation_never_counts_as_complete(
    tmp_path, node, sources, monkeypatch
):
    bucket, attempts = tmp_path / "bucket", []
    bucket.mkdir()
    (bucket / "x").write_text("all of it")
    begun, goes_on, ended = asyncio.Event(), threading.Event(), asyncio.Event()
    real, loop = LocalFileSystem.get, asyncio.get_running_loop()

    def slow(self: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        attempts.append(target)
        if len(attempts) > 1:
            real(self, source, target, **options)
            return
        Path(target).mkdir()
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait()
        (Path(target) / "x").write_text("a part")
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(LocalFileSystem, "get", slow)
    archive = packed(tmp_path, train=b"print()")
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    node.job(archive)
    node.text += f'[data.mounts]\ncopy = "file://{bucket}"\n'
    with contextlib.closing(node.preparation):
        node.preparation.look(RUNNING)
        await begun.wait()
        node.preparation.look({})
        view = await node.preparation.view(JOB)
        copy = Path(view["folder"]) / "copy" / "x"
        assert copy.read_text() == "all of it"
        goes_on.set()
        await ended.wait()
        assert copy.read_text() == "all of it"
        assert attempts[0] != attempts[1]


async def test_view_of_one_job_does_not_return_another_jobs_folder(node):
    with contextlib.closing(node.preparation):
        asking = asyncio.create_task(node.preparation.view(JOB))
        await asyncio.sleep(0)
        while node.preparation.job != JOB:
            await asyncio.sleep(0)
        node.text = "[model]\n"
        other = JobId("other")
        assert await node.preparation.view(other) == {}
        assert await asking == "the node is prepared for another job by now"


async def test_look_without_the_awaited_job_does_not_cancel_its_preparation(node):
    with contextlib.closing(node.preparation):
        asking = asyncio.create_task(node.preparation.view(JOB))
        while node.preparation.job != JOB:
            await asyncio.sleep(0)
        node.preparation.look({})
        assert node.preparation.job == JOB
        node.text = "[model]\n"
        assert await asking == {}
        node.preparation.look({})
        assert node.preparation.job is None


async def test_a_job_that_has_ended_is_not_prepared_for_a_generation_that_waits(node):
    ended = {job: replace(record, state="cancelled") for job, record in RUNNING.items()}
    with contextlib.closing(node.preparation):
        asking = asyncio.create_task(node.preparation.view(JOB))
        while node.preparation.job != JOB:
            await asyncio.sleep(0)
        node.preparation.look(ended)
        assert await asking == "the node is prepared for another job by now"


def test_data_is_not_linked_through_a_link_of_the_folder(tmp_path):
    folder = WorkFolder(tmp_path / "home")
    folder.files.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").symlink_to("kept")
    (folder.files / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(MountError, match="data a/data lies below a, a link"):
        link(folder, {"a/data": tmp_path})
    assert (tmp_path / "outside" / "data").readlink() == Path("kept")


async def test_a_missing_secret_is_named_before_anything_is_set_up(tmp_path, node, sources):
    archive = packed(tmp_path, train=b"print()")
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    node.job(archive, secrets=["TOKEN_OF_NOBODY"], setup=["false"])
    with contextlib.closing(node.preparation):
        assert "missing on this node: TOKEN_OF_NOBODY" in await node.preparation.view(JOB)
        (tmp_path / "TOKEN_OF_NOBODY").write_text("1")
        node.preparation.secrets = tmp_path
        node.job(archive, secrets=["TOKEN_OF_NOBODY"])
        node.preparation.look({})
        node.preparation.look(RUNNING)
        view = await node.preparation.view(JOB)
        assert view["secrets"] == {"TOKEN_OF_NOBODY": str(tmp_path / "TOKEN_OF_NOBODY")}


async def test_data_is_linked_and_checked_before_each_generation(tmp_path, node, sources):
    archive = packed(tmp_path, train=b"print()")
    sources.packages = {"leader:1": {str(package_of(archive)): archive}}
    there, bucket = tmp_path / "there", tmp_path / "bucket"
    (bucket / "inner").mkdir(parents=True)
    (bucket / "inner" / "x").write_text("of the bucket")
    (bucket / "one").write_text("a single file")
    mounts = {
        "inner/corpus": str(there),
        "copy": f"file://{bucket}",
        "single": f"file://{bucket}/one",
        "gone": f"file://{tmp_path}/no",
    }

    def mount(*names: str) -> None:
        node.job(archive)
        lines = "".join(f'"{name}" = "{mounts[name]}"\n' for name in names)
        node.text += f"[data.mounts]\n{lines}"
        node.preparation.look({})
        node.preparation.look(RUNNING)

    with contextlib.closing(node.preparation):
        mount("inner/corpus", "copy", "single")
        why = await node.preparation.view(JOB)
        assert why == f"data is missing on this node: inner/corpus ({there}); mount it there"
        there.mkdir()
        (there / "y").write_text("of the node")
        while not isinstance(view := await node.preparation.view(JOB), dict):
            await asyncio.sleep(0)
        folder = Path(view["folder"])
        assert (folder / "inner/corpus/y").read_text() == "of the node"
        assert (folder / "copy/inner/x").read_text() == "of the bucket"
        assert (folder / "single").read_text() == "a single file"
        there.rename(tmp_path / "elsewhere")
        assert await node.preparation.view(JOB) == why, "looked at before each generation"
        (tmp_path / "elsewhere").rename(there)
        while not isinstance(await node.preparation.view(JOB), dict):
            await asyncio.sleep(0)
        there.rename(tmp_path / "elsewhere")
        there.symlink_to(
            "x" * 300
        )  # Its error is not that of a missing file, as with a dead mount.
        why = f"inner/corpus ({there}: File name too long); mount it there"
        assert await node.preparation.view(JOB) == f"data is missing on this node: {why}"
        mount("gone")
        assert f"data gone cannot be copied from file://{tmp_path}/no: " in (
            await node.preparation.view(JOB)
        )


async def test_data_of_a_job_without_a_script_is_linked_in_a_folder_of_its_own(tmp_path, node):
    (tmp_path / "corpus.bin").write_text("tokens")
    node.text = f'[model]\n[data.mounts]\n"inner/corpus.bin" = "{tmp_path}/corpus.bin"\n'
    with contextlib.closing(node.preparation):
        view = await node.preparation.view(JOB)
    assert (Path(view["folder"]) / "inner/corpus.bin").read_text() == "tokens"
    assert node.told.empty()


def test_oldest_entries_are_deleted_but_never_those_in_use(tmp_path):
    paths = [tmp_path / str(number) for number in range(KEPT + 3)]
    for number, path in enumerate(paths):
        path.mkdir() if number % 2 else path.touch()
        os.utime(path, (number, number))
    delete_old(tmp_path, [paths[0]])
    assert sorted(tmp_path.iterdir()) == sorted([paths[0], *paths[-KEPT + 1 :]])


async def test_a_node_is_prepared_for_the_job_that_has_it(node):
    other = JobId("other")
    jobs = {**RUNNING, other: JobRecord(other, "running", part=(NodeId("a"),))}
    with contextlib.closing(node.preparation):
        node.preparation.look(jobs, other)
        assert node.preparation.job == other
        node.preparation.look(jobs)
        assert node.preparation.job == JOB
