"""The embedded store: kills, full disks, stopped processes, invalid clients."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from agents.store.factory import open_store
from agents.store.interface import Put, StoreRefused, StoreUnavailable, WriteUnknown
from agents.store.socket_server import serve
from agents.store.sqlite_file import SqliteFile, Transaction
from agents.store.sqlite_store import EmbeddedStore
from tests.agents.store.places import PATIENCE_S, Socket, wait_answer

pytestmark = pytest.mark.slow


@pytest.fixture
def socket() -> Iterator[Socket]:
    socket = Socket()
    yield socket
    socket.close()


async def test_a_kill_at_any_moment_loses_no_acknowledged_write(socket, examples):
    """Each transaction writes one number under three keys; no number is used twice."""
    random = Random(5)
    store = await socket.open()
    last = 0
    for _ in range(max(8, examples // 10)):
        await wait_answer(store)
        told = last
        killing = asyncio.get_running_loop().call_later(random.uniform(0, 0.1), socket.kill)
        while True:
            last += 1
            orders = [Put(f"/{name}", str(last).encode()) for name in "abc"]
            try:
                done = await store.transact([], orders)
            except (StoreUnavailable, WriteUnknown):
                break
            told = last
            assert done.is_applied
        killing.cancel()
        socket.start()
        snapshot = await wait_answer(store)
        entries = (await store.snapshot("")).entries
        (found,) = {int(entry.value) for entry in entries} or {0}
        assert told <= found <= last
        assert {entry.modified for entry in entries} <= {snapshot.revision}
        last = found
    await store.close()


async def test_leases_do_not_expire_while_the_store_is_down(socket):
    store = await socket.open()
    lease = await store.grant(1)
    await store.put("/a", b"", lease=lease.id)
    for down in (socket.kill, lambda: socket.process.send_signal(signal.SIGSTOP)):
        down()
        await asyncio.sleep(2)
        if socket.process.returncode is None:
            socket.process.send_signal(signal.SIGCONT)
        else:
            socket.start()
        snapshot = await store.snapshot("/")
        assert [entry.key for entry in snapshot.entries] == ["/a"]
        assert await store.keep(lease.id)
    async with aclosing(store.watch("/", after=snapshot.revision)) as news:
        gone = await asyncio.wait_for(anext(news), PATIENCE_S)
    assert gone.changes[0].entry is None
    await store.close()


async def test_a_full_disk_is_reported_and_recovered_from(socket):
    store = await socket.open()
    await store.put("/a", b"before")
    watching = store.watch("/", after=1)
    told = asyncio.create_task(anext(watching))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(socket.process.pid, resource.RLIMIT_FSIZE, (100_000, hard))
    with pytest.raises((StoreUnavailable, WriteUnknown), match="the store's file"):
        await _count_up(store, 10)
    assert (await store.get("/a")).value in (b"before", b"x" * 50_000)
    resource.prlimit(socket.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    revision = await store.put("/a", b"after")
    assert await store.get("/a") == (await store.snapshot("/")).entries[0]
    assert (await store.get("/a")).modified == revision
    assert (await asyncio.wait_for(told, PATIENCE_S)).revision == 2
    await watching.aclose()
    await store.close()


async def _count_up(store, end):
    for _ in range(end):
        await store.put("/a", b"x" * 50_000)


async def test_a_batch_that_fails_is_rolled_back(tmp_path):
    ledger = SqliteFile(tmp_path / "store.db")
    good = Transaction((), (Put("/a", b""),))
    with pytest.raises(UnicodeEncodeError):  # As a bug would.
        ledger.apply([good, Transaction((), (Put("\ud800", b""),))])
    assert ledger.snapshot("").entries == ()
    assert ledger.apply([good]).changed[0].revision == 1
    ledger.close()


async def test_one_process_at_a_time_can_open_the_file(socket):
    await wait_answer(store := await socket.open())
    await store.close()
    file = socket.folder / "store.db"
    with pytest.raises(StoreUnavailable, match="in use by another process"):
        await EmbeddedStore.open(file)
    socket.kill()
    store = await EmbeddedStore.open(file)
    with pytest.raises(StoreUnavailable, match="in use by another process"):
        await EmbeddedStore.open(file)
    await store.close()


async def test_only_the_owner_can_read_the_file_and_connect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = await EmbeddedStore.open(tmp_path / "new" / "store.db")
    await store.put("/a", b"")
    server = await serve(store, Path("s"))
    shared = await serve(store, Path("t"), mode=0o660)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert [stat.S_IMODE(Path(name).stat().st_mode) for name in "st"] == [0o600, 0o660]
    await server.close()
    await shared.close()
    await store.close()


async def test_a_file_that_is_no_store_is_refused_and_left_unchanged(tmp_path):
    text = tmp_path / "text"
    text.write_text("Some notes. " * 100)
    with pytest.raises(StoreRefused, match="not a database"):
        await EmbeddedStore.open(text)
    assert text.read_text() == "Some notes. " * 100
    before = _foreign(tmp_path / "foreign")
    with pytest.raises(StoreRefused, match="not a store of Sailor"):
        await EmbeddedStore.open(tmp_path / "foreign")
    assert (tmp_path / "foreign").read_bytes() == before
    with pytest.raises(StoreRefused, match="cannot be used as the store"):
        await EmbeddedStore.open(tmp_path)
    with pytest.raises(StoreRefused, match="cannot be used as the store"):
        await EmbeddedStore.open(text / "below")
    newer = tmp_path / "newer"
    await (await EmbeddedStore.open(newer)).close()
    with sqlite3.connect(newer) as base:
        base.execute("PRAGMA user_version = 2")
    base.close()
    with pytest.raises(StoreRefused, match="has format 2; this release reads 1"):
        await EmbeddedStore.open(newer)


def _foreign(path):
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE mine (x)")
    base.close()
    return path.read_bytes()


async def test_each_of_many_concurrent_writes_has_a_revision(tmp_path):
    store = await EmbeddedStore.open(tmp_path / "store.db")
    revisions = await asyncio.gather(*(store.put(f"/{i}", b"") for i in range(100)))
    assert sorted(revisions) == list(range(1, 101))
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.put("/a", b"")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        (3).to_bytes(4, "big") + b"[1]",
        (200_000).to_bytes(4, "big") + b"[" * 200_000,
        (9).to_bytes(4, "big") + b'{"id":"a"',
    ],
)
@pytest.mark.usefixtures("no_collection")
async def test_a_client_with_invalid_frames_is_disconnected_and_no_other(socket, said):
    store = await socket.open()
    await wait_answer(store)
    reader, writer = await asyncio.open_unix_connection(socket.socket)
    writer.write(said)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    await writer.wait_closed()
    await store.put("/a", b"")
    await store.close()


async def test_an_invalid_request_is_refused_with_a_message(socket):
    store = await socket.open()
    await wait_answer(store)
    reader, writer = await asyncio.open_unix_connection(socket.socket)
    questions = [
        {"do": "drop everything"},
        {"do": "get"},
        {"do": "get", "key": 7},
        {"do": "grant", "ttl_s": "long"},
        {"do": "grant", "ttl_s": -1},
        {"do": "transact", "compares": [], "orders": [["Put", {"key": "/a", "value": "!"}]]},
        {
            "do": "transact",
            "compares": [["ModifiedAt", {"key": "/a", "revision": "1"}]],
            "orders": [],
        },
        {"do": "transact", "compares": [["NewerThan", {"key": "/a", "revision": 1}]], "orders": []},
        {"do": "transact", "compares": 5, "orders": []},
        {"do": "watch", "prefix": "/"},
        {"do": "get", "key": "\ud800"},
    ]
    for number, question in enumerate(questions):
        frame = json.dumps({"id": number, **question}).encode()
        writer.write(len(frame).to_bytes(4, "big") + frame)
        length = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), PATIENCE_S), "big")
        answer = json.loads(await reader.readexactly(length))
        assert answer["id"] == number
        assert answer["error"][0] == "StoreRefused", question
    writer.close()
    await writer.wait_closed()
    assert (await store.snapshot("/")).revision == 0
    await store.close()


async def test_an_impossible_socket_path_is_refused(tmp_path):
    store = await EmbeddedStore.open(tmp_path / "store.db")
    with pytest.raises(StoreRefused, match="cannot be used as a socket"):
        await serve(store, tmp_path / ("long" * 40))
    (tmp_path / "folder").mkdir()
    await store.close()
    there = await open_store(f"unix://{tmp_path}/none?timeout_s=0.1")
    with pytest.raises(StoreUnavailable, match=r"no answer from the store at .*none within 0.1 s"):
        await there.get("/a")
    await there.close()
