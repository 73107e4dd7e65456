"""The storm's network, object store and clock faults work, and its leak checks find leaks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from agents.daemon.process_cleanup import mark
from agents.snapshots.upload import upload_pieces
from sailord.checkpoints.object_storage import Away, open_storage
from sailord.local.paths import LocalFolders
from tests.agents.sealing import write_snapshot
from tests.chaos import leaks
from tests.chaos.faulty import TROUBLE, Faulty
from tests.chaos.net import CUT, DEAF, FAIR, MUTE, Net
from tests.sailord.checkpoints.made import JOB, make

LISTENER = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(1, flush=True)
time.sleep(60)
"""
SAID = b"said"


# ---- leaks --------------------------------------------------------------------------------------


def test_files_left_in_memory_are_found(tmp_path):
    assert not list(leaks.in_memory(tmp_path))
    write_snapshot(tmp_path / "a1", step=5, pieces={(0, 0): b"left"})
    assert len(list(leaks.in_memory(tmp_path))) == 1


def test_an_unexpected_listening_port_is_found(tmp_path):
    assert not list(leaks.ports(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        env={**os.environ, **mark(tmp_path)},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert len(list(leaks.ports(tmp_path))) == 1
            assert not list(leaks.ports(tmp_path, [process.pid]))
        finally:
            process.kill()


def test_unmapped_shared_memory_is_found(tmp_path):
    left = Path("/dev/shm") / f"sailor-test-{os.getpid()}"
    left.touch()
    try:
        assert f"shared memory {left}" in list(
            leaks.in_shared_memory(LocalFolders(tmp_path, port=0))
        )
    finally:
        left.unlink()


def test_an_object_of_no_kept_checkpoint_is_found(tmp_path):
    old = make(tmp_path, 5)
    new = make(tmp_path, 10, parent=old.durable)
    storage = open_storage(f"file://{tmp_path}")

    def left(keep: int) -> list[str]:
        return list(
            leaks.in_durable(storage, JOB, durable=new.durable.point, keep=keep, begun=None)
        )

    assert left(2) == []
    assert left(1)  # Then the older one is garbage.
    stray = tmp_path / JOB / f"1-{new.durable.point.step}" / "7-gone.snap"
    stray.write_bytes(b"half an object")
    assert len(left(2)) == 1
    assert all(not faults for _, faults in leaks.readable(storage, JOB))
    stray.with_name(new.manifest.objects[0].name).write_bytes(b"damaged")
    assert any(faults for _, faults in leaks.readable(storage, JOB))


# ---- the network --------------------------------------------------------------------------------


@pytest.fixture
def net() -> Iterator[Net]:
    """Proxies whose opener, this process, is named a."""
    net = Net(lambda: {os.getpid(): "a"})
    net.start()
    yield net
    net.close()


def connect(net: Net, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection from a to b."""
    host, port = listener.getsockname()
    begin_host, _, begin_port = net.tcp(f"{host}:{port}", "b").partition(":")
    near = socket.create_connection((begin_host, int(begin_port)))
    far, _ = listener.accept()
    near.settimeout(0.3)
    far.settimeout(0.3)
    return near, far


def receives(far: socket.socket, near: socket.socket) -> bool:
    """Return whether data from one end reaches the other within a short time."""
    near.sendall(SAID)
    try:
        return far.recv(100) == SAID
    except TimeoutError:
        return False


@pytest.mark.parametrize("name", ["a", "b"])
def test_cut_data_arrives_after_the_cut(net: Net, name: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, far = connect(net, listener)
        assert receives(far, near)
        assert receives(near, far)
        net.faults_of[name] = CUT
        assert not receives(far, near)
        net.faults_of[name] = FAIR
        far.settimeout(20.0)
        assert far.recv(100) == SAID
        near.close()
        far.close()


def test_a_deaf_end_can_still_send(net: Net):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, far = connect(net, listener)
        net.faults_of["a"] = DEAF
        assert not receives(near, far)
        far.settimeout(20.0)
        assert receives(far, near)
        net.faults_of["a"] = MUTE
        far.settimeout(0.3)
        assert not receives(far, near)
        near.close()
        far.close()


def test_a_reset_breaks_open_connections(net: Net):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, far = connect(net, listener)
        assert receives(far, near)
        net.reset("b")
        near.settimeout(20.0)
        with pytest.raises(ConnectionResetError):
            near.recv(100)
        near.close()
        far.close()


# ---- the object store ---------------------------------------------------------------------------


@pytest.fixture
def upload(tmp_path, monkeypatch):
    """Return a function that uploads an object while the store fails in some way."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    trouble = tmp_path / "trouble"
    monkeypatch.setenv(TROUBLE, str(trouble))
    monkeypatch.setattr("tests.chaos.faulty.SHARE", 1.0)
    header = write_snapshot(tmp_path / "own", step=5, pieces={(0, 0): bytes(20_000)})
    path = tmp_path / "own" / "job" / "1-5" / header.file_name

    def upload(kind: str) -> Path:
        trouble.write_text(kind)
        upload_pieces(f"faulty://{tmp_path}/far/job/object", path, header)
        return tmp_path / "far/job/object"

    return upload


def test_an_object_store_without_faults_stores_objects(upload, tmp_path):
    assert upload("").stat().st_size > 20_000
    storage = open_storage(f"faulty://{tmp_path}/far")
    storage.write("job/other", b"abcd")
    assert storage.read("job/other", 1, 3) == b"bc"
    assert [entry.name for entry in storage.entries("job")] == ["object", "other"]
    storage.delete("job/other")
    assert [entry.name for entry in storage.entries("job")] == ["object"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("errors", "overloaded"), ("short", "differs from what was written"), ("twice", "reset")],
)
def test_injected_failures_are_errors_for_the_writer(upload, tmp_path, kind: str, said: str):
    with pytest.raises(OSError, match=said):
        upload(kind)
    if kind == "errors":
        with pytest.raises(Away, match=said):
            open_storage(f"faulty://{tmp_path}/far").read("job/object")
    assert upload("").stat().st_size > 20_000  # The failed upload does not block the next attempt.


def test_a_truncated_manifest_is_an_error_and_can_be_rewritten(upload, tmp_path):
    upload("")
    storage = open_storage(f"faulty://{tmp_path}/far")
    (tmp_path / "trouble").write_text("short")
    with pytest.raises(Away, match="differs from what was written"):
        storage.write("job/manifest", b"abcd")
    (tmp_path / "trouble").write_text("")
    storage.write("job/manifest", b"abcd")
    assert storage.read("job/manifest") == b"abcd"


# ---- clocks -------------------------------------------------------------------------------------


def test_a_clock_offset_applies_to_a_running_process(tmp_path):
    from tests.chaos.cluster import SITE  # noqa: PLC0415 - needs nothing else of the cluster

    ahead = tmp_path / "clock"
    ahead.write_bytes(bytes(8))
    program = (
        "import struct, sys, time; before = time.time()\n"
        "open(sys.argv[1], 'r+b').write(struct.pack('d', 4000.0)); print(time.time() - before)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(ahead)],
        env={**os.environ, "PYTHONPATH": str(SITE), "SAILOR_CHAOS_CLOCK": str(ahead)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 4000 <= float(said) < 4000 + 60
