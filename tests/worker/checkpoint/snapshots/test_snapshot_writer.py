"""Files of snapshots: room for them, and copies from a GPU into them (CUDA is recorded)."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.worker.checkpoint.test_snapshot_file import header_of
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshots import snapshot_writer
from worker.checkpoint.snapshots.snapshot_writer import (
    CopySources,
    SnapshotCopier,
    SnapshotWriter,
    pin,
    unpin,
)
from worker.data.loader_processes import _part_with_files


class FakeCuda:
    """What the copier asks of torch.cuda, written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.registered: dict[int, int] = {}
        self.Stream = self.make_stream

    def set_device(self, _):
        self.calls.append(("device", threading.current_thread().name))

    def make_stream(self, device):
        self.calls.append(("stream", device))
        return SimpleNamespace(
            wait_event=lambda event: self.calls.append(("waits for", event)),
            synchronize=lambda: self.calls.append(("finished", None)),
        )

    def stream(self, _):
        return nullcontext()

    def cudart(self):
        def register(address, length, _):
            self.registered[address] = length
            return 0

        unregister = self.registered.pop
        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(snapshot_writer, "_cuda", fake)
    return fake


def test_each_thread_selects_its_device_and_keeps_one_stream(cuda):
    copier, source, target = SnapshotCopier(), torch.arange(4.0), torch.zeros(4)
    for number in range(3):
        thread = threading.Thread(
            target=copier.copy, args=([source], [target], f"event {number}"), name=f"t{number}"
        )
        thread.start()
        thread.join()
    assert torch.equal(source, target)
    assert [name for what, name in cuda.calls if what == "device"] == ["t0", "t1", "t2"]
    assert len([each for each in cuda.calls if each[0] == "stream"]) == 1
    kinds = [what for what, _ in cuda.calls if what in {"waits for", "finished"}]
    assert kinds == ["waits for", "finished"] * 3


def test_files_are_pinned_while_they_are_mapped(cuda):
    body = mmap.mmap(-1, 8192)
    assert pin(body)
    assert list(cuda.registered.values()) == [8192]
    unpin(body)
    assert not cuda.registered


def test_a_refused_file_leaves_no_error_to_the_next_step(cuda, monkeypatch, capsys):
    left = []

    def refuse(*_):
        left.append("invalid argument")
        return 1

    def launch(*_, **__):
        raise RuntimeError(f"CUDA error: {left.pop()}")

    monkeypatch.setattr(cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch, "zeros", launch)
    assert not pin(mmap.mmap(-1, 8192))
    assert not left
    assert "a folder on tmpfs such as /dev/shm can be pinned" in capsys.readouterr().out


def test_processes_that_load_samples_take_no_part_of_a_snapshots_memory(tmp_path):
    """They live for longer than some of the files."""
    writer = SnapshotWriter(tmp_path, header_of(8192), CopySources((), []))
    writer.reserve(2)
    assert held(tmp_path) == 6, "each file is mapped, and open twice"
    reader, child_writes = os.pipe()
    child = os.fork()
    if not child:
        _part_with_files()
        os.write(child_writes, bytes([held(tmp_path)]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"\0"
    writer.close()
    assert held(tmp_path) == 0
    for each in (reader, child_writes):
        os.close(each)


@pytest.fixture
def full(monkeypatch):
    """How many more files there is room for."""
    left, create = [1], snapshot_file.create

    def create_if_room(path: Path, size: int) -> int:
        if not left[0]:
            raise snapshot_file.NoRoomError.of(28, "full", path.parent, size)
        left[0] -= 1
        return create(path, size)

    monkeypatch.setattr(snapshot_file, "create", create_if_room)
    monkeypatch.setattr(snapshot_writer, "_POLL_S", 0.0)
    return left


def test_files_that_are_needed_wait_for_room_and_others_do_not(tmp_path, full):
    told = []

    def make_room(needed_bytes, safe_step):
        told.append((needed_bytes, safe_step))
        full[0] += 1

    writer = SnapshotWriter(tmp_path, header_of(8192), CopySources((), []), on_no_room=make_room)
    writer.reserve(2, 1)
    assert told == [(writer.template.total_bytes, 0)]
    assert len(list(snapshot_file.unfinished_files(tmp_path))) == 2
    writer.close()


@pytest.mark.usefixtures("full")
def test_wait_for_room_ends_with_the_generation_and_leaves_no_file(tmp_path):
    def has_ended(*_):
        raise InterruptedError

    writer = SnapshotWriter(tmp_path, header_of(8192), CopySources((), []), on_no_room=has_ended)
    with pytest.raises(InterruptedError):
        writer.reserve(2)
    assert list(snapshot_file.unfinished_files(tmp_path)) == []


def held(folder):
    """Return how often this process has files of a folder open or mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    opened = [os.readlink(each) for each in links if each.is_symlink()]
    return sum(str(folder) in each for each in (*maps, *opened))
