"""Fetching pieces: the nearest intact copy is used, and problems are reported."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.worker.checkpoint.fetching import fetch_all
from tests.worker.checkpoint.one_object import commit_object
from tests.worker.checkpoint.test_snapshot_file import header_of, write
from tests.worker.control.fake_agents import snapshot_server
from worker.checkpoint import snapshot_file
from worker.checkpoint.fetch import PieceNotFoundError, fetch
from worker.checkpoint.piece_queue import PieceQueue
from worker.checkpoint.piece_sources import DurableSource, LocalSource, PeerSource, SourceError
from worker.checkpoint.reader import Reader

POINT = {"generation": 4, "step": 7}
MODEL = "f" * 32
SIZES = (100, 0, 5000, 64)
KEYS = [(0, 0), (1, 0), (1, 1)]


def own(memory: Path) -> LocalSource:
    return LocalSource.at(memory, "j1", **POINT)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[PeerSource, Path]]:
    """Another node and its folder."""
    memory = tmp_path / "peer"
    with snapshot_server(memory) as port:
        yield PeerSource.at("b", f"127.0.0.1:{port}", Reader("t"), "j1", **POINT), memory


def damage(path: Path, piece: snapshot_file.Piece) -> None:
    content = bytearray(path.read_bytes())
    content[piece.offset + piece.bytes // 2] ^= 4
    path.write_bytes(content)


def expected(found: snapshot_file.SealedFile) -> dict[tuple[int, int], bytes]:
    return {p.key: snapshot_file.read_piece(found.path, p) for p in found.header.pieces if p.bytes}


def as_bytes(bodies) -> dict[tuple[int, int], bytes]:
    return {key: bytes(body) for key, body in bodies.items()}


def test_own_files_are_used_first(tmp_path, peer):
    found = write(tmp_path / "own", header_of(*SIZES))
    write(peer[1], header_of(*SIZES))
    got = fetch_all(KEYS, [[own(tmp_path / "own")], [peer[0]]], model=MODEL)
    assert as_bytes(got.bodies) == expected(found)
    assert got.report.bytes_by_source == {"this node": 5164}
    assert got.report.header.progress == found.header.progress


def test_own_pieces_are_mapped_and_not_each_time_the_whole_file(tmp_path):
    found = write(tmp_path / "own", header_of(*SIZES, 50_000))
    content = found.path.read_bytes()
    for offset, size in ((0, 10), (4095, 2), (4096, 64), (len(content) - 9, 9)):
        part = own(tmp_path / "own").read(found.path.name, offset, size)
        assert bytes(part) == content[offset : offset + size]
        assert len(part.obj) <= size + 4096
    with pytest.raises(SourceError, match=r"this node: 2\.snap"):
        own(tmp_path / "own").read(found.path.name, len(content) - 9, 10)


def test_own_pieces_of_layers_that_train_nothing_are_empty(tmp_path):
    found = write(tmp_path / "own", header_of(0, 0))
    keys = [piece.key for piece in found.header.pieces]
    got = fetch_all(keys, [[own(tmp_path / "own")]], model=MODEL)
    assert as_bytes(got.bodies) == dict.fromkeys(keys, b"")


def test_damaged_piece_is_fetched_from_a_peer(tmp_path, peer):
    found = write(tmp_path / "own", header_of(*SIZES))
    want = expected(found)
    write(peer[1], header_of(*SIZES, rank=5))
    damage(found.path, found.header.pieces[2])
    got = fetch_all(KEYS, [[own(tmp_path / "own")], [peer[0]]], model=MODEL)
    assert as_bytes(got.bodies) == want
    assert got.report.bytes_by_source == {"this node": 164, "b": 5000}
    assert got.report.problems == (
        "this node: 2.snap: piece 0 of layer 1 is damaged: its checksum does not match",
    )


def test_dead_source_does_not_delay_the_others(tmp_path, peer):
    found = write(peer[1], header_of(*SIZES))
    gone = PeerSource.at("gone", "127.0.0.1:1", Reader("t"), "j1", **POINT)
    got = fetch_all(KEYS, [[own(tmp_path / "nothing")], [gone, peer[0]]], model=MODEL)
    assert as_bytes(got.bodies) == expected(found)


def test_reads_of_one_thread_share_a_connection_and_none_stays_open_after_the_end(peer):
    source, memory = peer
    found = write(memory, header_of(*SIZES))
    piece = next(piece for piece in found.header.pieces if piece.bytes)
    sockets = set()
    for _ in range(3):
        source.read(found.path.name, piece.offset, piece.bytes)
        (connection,) = source._connections
        sockets.add(connection.sock)
    assert len(sockets) == 1
    source.close()
    source.read(found.path.name, piece.offset, piece.bytes)  # A request that was under way.
    assert connection.sock is None


def test_read_whose_connection_was_closed_is_sent_again(peer):
    source, memory = peer
    found = write(memory, header_of(*SIZES))
    piece = next(piece for piece in found.header.pieces if piece.bytes)
    want = source.read(found.path.name, piece.offset, piece.bytes)
    (connection,) = source._connections
    connection.sock.shutdown(socket.SHUT_RDWR)
    assert source.read(found.path.name, piece.offset, piece.bytes) == want
    source.close()


def test_missing_pieces_are_named(peer):
    write(peer[1], header_of(100, 0))
    gone = PeerSource.at("gone", "127.0.0.1:1", Reader("t"), "j1", life="gone.1", **POINT)
    left = PeerSource.at("left", "127.0.0.1:1", Reader("t"), "j1", **POINT)
    with pytest.raises(
        PieceNotFoundError, match="no source has piece 0 of layer 1, piece 1 of layer 1"
    ) as raised:
        fetch_all(KEYS, [[peer[0]], [gone, left]], model=MODEL)
    assert "gone: " in str(raised.value)
    assert raised.value.unreachable == {"gone.1"}, "nothing was expected of a node that had left"


def test_source_that_dies_after_its_listing_is_named(peer, monkeypatch):
    source, memory = peer
    write(memory, header_of(*SIZES))
    source.life = "b.1"
    listing = source.files()
    source.close()
    source.address = "127.0.0.1:1"
    source._local = threading.local()
    monkeypatch.setattr(source, "files", lambda: listing)
    with pytest.raises(PieceNotFoundError) as raised:
        fetch_all(KEYS, [[source]], model=MODEL)
    assert raised.value.unreachable == {"b.1"}


def test_cancellation_ends_the_search(tmp_path):
    found = write(tmp_path, header_of(*SIZES))
    assert found.path.exists()

    def check_cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_all(KEYS, [[own(tmp_path)]], model=MODEL, check_cancelled=check_cancelled)


def test_weights_are_read_without_moments_that_a_rank_does_not_keep(peer):
    found = with_sums_of_weights(write(peer[1], header_of(*SIZES)))
    want = expected(found)
    wanted = {(0, 0): True, (1, 0): False, (1, 1): False}
    got = fetch_all(wanted, [[peer[0]]], model=MODEL)
    assert found.header.moments == 2
    assert {key: bytes(body) for key, body in got.bodies.items()} == {
        (0, 0): want[0, 0],
        (1, 0): want[1, 0][: 5000 // 3],
        (1, 1): want[1, 1][: 64 // 3],
    }
    assert got.report.bytes_by_source == {"b": 100 + 5000 // 3 + 64 // 3}


def test_weights_are_taken_from_a_piece_with_damaged_moments(tmp_path):
    found = with_sums_of_weights(write(tmp_path, header_of(*SIZES)))
    want = expected(found)[1, 0][: 5000 // 3]
    damage(found.path, found.header.pieces[2])
    got = fetch_all({(1, 0): False}, [[own(tmp_path)]], model=MODEL)
    assert bytes(got.bodies[1, 0]) == want
    with pytest.raises(PieceNotFoundError, match="piece 0 of layer 1 is damaged"):
        fetch_all({(1, 0): True}, [[own(tmp_path)]], model=MODEL)


def test_damaged_weights_are_not_taken(tmp_path):
    found = with_sums_of_weights(write(tmp_path, header_of(*SIZES)))
    damage(found.path, replace(found.header.pieces[2], bytes=2))
    with pytest.raises(PieceNotFoundError, match="piece 0 of layer 1 is damaged"):
        fetch_all({(1, 0): False}, [[own(tmp_path)]], model=MODEL)


def test_a_file_that_names_a_piece_twice_is_damaged(tmp_path):
    found = write(tmp_path, header_of(*SIZES))
    document = snapshot_file.header_document(found.header)
    document["pieces"].append(document["pieces"][0])
    with pytest.raises(snapshot_file.SnapshotError, match="names a piece twice"):
        snapshot_file.header_from(document, name="it")


def test_older_files_have_no_sums_of_weights_and_are_read_whole(tmp_path):
    found = write(tmp_path, header_of(*SIZES))
    got = fetch_all({(1, 0): False}, [[own(tmp_path)]], model=MODEL)
    assert bytes(got.bodies[1, 0]) == expected(found)[1, 0]


def with_sums_of_weights(found: snapshot_file.SealedFile) -> snapshot_file.SealedFile:
    """Seal the file again as a rank's snapshot is."""
    pieces = [
        replace(
            piece,
            weights_checksum=snapshot_file.checksum(
                snapshot_file.read_piece(found.path, piece)[: piece.bytes // 3]
            ),
        )
        for piece in found.header.pieces
    ]
    header = replace(found.header, pieces=tuple(pieces))
    with found.path.open("r+b") as file:
        snapshot_file.seal(file.fileno(), header)
    return snapshot_file.SealedFile(found.path, header)


@pytest.fixture
def read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each piece with a request of its own, as if it were large."""
    monkeypatch.setattr("worker.checkpoint.fetch.REQUEST_BYTES_MAX", 1)


class Body(bytearray):
    """A piece that can be seen to be freed."""


@pytest.mark.usefixtures("read_alone")
def test_no_more_is_in_memory_than_is_held_at_once(peer):
    source, memory = peer
    found = write(memory, header_of(3000, 0, 3000, 2000, 3000, 9000))
    keys = dict.fromkeys(expected(found), True)
    arrived, most = PieceQueue(6000), []
    made: list[weakref.ref[Body]] = []
    inner = source.read

    def noted(file, offset, size):
        body = Body(inner(file, offset, size))
        made.append(weakref.ref(body))
        most.append(sum(len(there) for each in made if (there := each()) is not None))
        return body

    source.read = noted
    fetched = threading.Thread(
        target=fetch, args=(keys, [[source]]), kwargs={"model": MODEL, "into": arrived}
    )
    fetched.start()
    bodies = {}
    while len(bodies) < len(keys):
        arrived.wait_for_piece(10.0)
        for key, body in arrived.drain():
            bodies[key] = bytes(body)
            del body
    fetched.join()
    assert bodies == expected(found)
    assert max(most) <= 9000, "the largest piece alone"


@pytest.mark.usefixtures("read_alone")
def test_search_that_waits_for_memory_ends_when_it_is_cancelled(peer):
    found = write(peer[1], header_of(3000, 0, 3000, 2000))
    arrived, checks = PieceQueue(10), iter(range(100))

    def check_cancelled() -> None:
        if next(checks) > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(
            dict.fromkeys(expected(found), True),
            [[peer[0]]],
            model=MODEL,
            into=arrived,
            check_cancelled=check_cancelled,
        )


# ---- the durable store --------------------------------------------------------------------------


def committed(tmp_path: Path) -> tuple[str, snapshot_file.SealedFile]:
    """A checkpoint of one object."""
    found = write(tmp_path / "was", header_of(*SIZES))
    folder = tmp_path / "store" / "j1" / "4-7"
    folder.mkdir(parents=True)
    found.path.rename(folder / "2-life.snap")
    found = replace(found, path=folder / "2-life.snap")
    return commit_object(found.path), found


def test_durable_checkpoint_is_read_if_no_memory_has_the_state(tmp_path):
    manifest, found = committed(tmp_path)
    got = fetch_all(KEYS, [[own(tmp_path / "gone")], [DurableSource(manifest)]], model=MODEL)
    assert as_bytes(got.bodies) == expected(found)


def test_headers_of_a_checkpoint_are_read_at_the_same_time(tmp_path, monkeypatch):
    both, read = threading.Barrier(2, timeout=20.0), LocalFileSystem.cat_file
    manifest = commit_object(*(write(tmp_path, header_of(9, rank=rank)).path for rank in (0, 1)))

    def cat_file(self, path, start=None, end=None, **how):
        if path.endswith(".snap"):
            both.wait()
        return read(self, path, start, end, **how)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    found = DurableSource(manifest).files()
    assert {name: header.rank for name, header in found.items()} == {"0.snap": 0, "1.snap": 1}


def test_damaged_object_is_named(tmp_path):
    manifest, found = committed(tmp_path)
    damage(found.path, found.header.pieces[3])
    where = r"2-life\.snap: piece 1 of layer 1 is damaged"
    with pytest.raises(PieceNotFoundError, match=where):
        fetch_all(KEYS, [[DurableSource(manifest)]], model=MODEL)


@pytest.mark.parametrize("case", ["gone", "cut", "other", "manifest", "changed", "scheme"])
def test_invalid_checkpoints_are_reported(tmp_path, case):
    manifest, found = committed(tmp_path)
    match case:
        case "gone":
            found.path.unlink()
        case "cut":
            found.path.write_bytes(found.path.read_bytes()[:100])
        case "other":
            other = write(tmp_path / "x", header_of(*SIZES, node="n7"))
            other.path.replace(found.path)
        case "manifest":
            Path(manifest.removeprefix("file://")).write_text("{}")
        case "changed":
            path = Path(manifest.removeprefix("file://"))
            path.write_text(path.read_text().replace("{", '{"term": 7, ', 1))
        case "scheme":
            manifest = "nowhere://bucket/manifest.json"
    with pytest.raises(SourceError):
        DurableSource(manifest).files()
    with pytest.raises(PieceNotFoundError, match="no source has"):
        fetch_all(KEYS, [[DurableSource(manifest)]], model=MODEL)


@dataclass(frozen=True, slots=True)
class Slow:
    """A peer that does not answer until it is released."""

    inner: LocalSource
    gate: threading.Event
    name: str = "slow"

    def files(self):
        self.gate.wait()
        return self.inner.files()

    def read(self, file, offset, size):
        return self.inner.read(file, offset, size)

    def close(self):
        return


def test_first_source_that_answers_is_used(tmp_path):
    found = write(tmp_path, header_of(*SIZES))
    gate = threading.Event()
    got = fetch_all(KEYS, [[Slow(own(tmp_path), gate), own(tmp_path)]], model=MODEL)
    gate.set()
    assert as_bytes(got.bodies) == expected(found)
    assert set(got.report.bytes_by_source) == {"this node"}
