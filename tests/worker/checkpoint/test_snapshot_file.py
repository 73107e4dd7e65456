"""The snapshot file format: sealing, reading single pieces, and detecting damage."""

from __future__ import annotations

import os
import random
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.agents import sealing
from tests.worker.control.fake_agents import write_copy
from worker.checkpoint import snapshot_file
from worker.types import LogicalTensor

PROGRESS = snapshot_file.SavedProgress(7, 6, 65536.0, 3, "ab" * 16, 56, 448)


def header_of(*sizes: int, rank: int = 2, **changes) -> snapshot_file.Header:
    """Return a header with pieces of these sizes, two for each layer."""
    pieces = tuple(
        snapshot_file.Piece(
            n // 2, n % 2, 0, size, is_written=n % 3 == 0, buddy="n9" if n % 2 else None
        )
        for n, size in enumerate(sizes)
    )
    fields = {
        "job": "j1",
        "generation": 4,
        "step": 7,
        "term": 3,
        "rank": rank,
        "node": "n1",
        "atoms": 1,
        "layers": 3,
        "dtype": "float32",
        "moments": 2,
        "model": "f" * 32,
        "persist": True,
        "progress": PROGRESS,
        "pieces": pieces,
    }
    return snapshot_file.with_offsets(snapshot_file.Header(**{**fields, **changes}))


def write(memory: Path, header: snapshot_file.Header, *, seed: int = 0) -> snapshot_file.SealedFile:
    """Write a sealed file with random pieces."""
    draw = random.Random(seed)
    bodies = {piece.key: draw.randbytes(piece.bytes) for piece in header.pieces}
    summed = tuple(
        replace(p, checksum=snapshot_file.checksum(bodies[p.key])) for p in header.pieces
    )
    header = replace(header, pieces=summed)
    folder = snapshot_file.point_folder(
        memory, header.job, generation=header.generation, step=header.step
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = write_copy(folder, header, bodies)
    return snapshot_file.SealedFile(path, snapshot_file.read_header(path))


def test_sealed_file_round_trips(tmp_path):
    found = write(tmp_path, header_of(100, 0, 4097, 5))
    (seen,) = snapshot_file.sealed_files(found.path.parent)
    assert seen == found
    assert [piece.bytes for piece in seen.header.pieces] == [100, 0, 4097, 5]
    assert [piece.buddy for piece in seen.header.pieces] == [None, "n9", None, "n9"]
    assert seen.header.progress == PROGRESS
    draw = random.Random(0)
    for piece in seen.header.pieces:
        assert piece.offset % 64 == 0
        assert snapshot_file.read_piece(seen.path, piece) == draw.randbytes(piece.bytes)
    assert list(snapshot_file.point_folders(tmp_path)) == [("j1", 4, 7, found.path.parent)]


def test_listing_matches_the_headers(tmp_path):
    found = [write(tmp_path, header_of(9, 8, rank=rank), seed=rank) for rank in (0, 3)]
    headers = {each.path.name: each.header for each in found}
    assert snapshot_file.listing_from(snapshot_file.listing(headers), name="node b") == headers
    with pytest.raises(snapshot_file.SnapshotError, match="node b sent an invalid answer"):
        snapshot_file.listing_from(b'[{"file": "0.snap"}]', name="node b")


def test_unsealed_file_is_ignored(tmp_path):
    found = write(tmp_path, header_of(100, 50))
    with found.path.open("r+b") as file:
        snapshot_file.unseal(file.fileno())
    assert list(snapshot_file.sealed_files(found.path.parent)) == []
    with pytest.raises(snapshot_file.SnapshotError, match="not sealed"):
        snapshot_file.read_header(found.path)
    with found.path.open("r+b") as file:
        snapshot_file.seal(file.fileno(), found.header)
    assert list(snapshot_file.sealed_files(found.path.parent)) == [found]


@pytest.mark.parametrize("keep", [0, 10, 31, 32, 200, 4096, 4195])
def test_truncated_file_is_skipped(tmp_path, keep):
    found = write(tmp_path, header_of(100))
    os.truncate(found.path, keep)
    assert list(snapshot_file.sealed_files(found.path.parent)) == []
    with pytest.raises(snapshot_file.SnapshotError, match=r"2\.snap is truncated"):
        snapshot_file.read_header(found.path)


def test_a_piece_is_whole_though_a_read_returns_less_than_asked_for(tmp_path, monkeypatch):
    found, read = write(tmp_path, header_of(100, 0, 4097)), os.pread
    want = [snapshot_file.read_piece(found.path, piece) for piece in found.header.pieces]
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 1000), at))
    assert [len(piece) for piece in want] == [100, 0, 4097]
    assert [snapshot_file.read_piece(found.path, piece) for piece in found.header.pieces] == want


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bit_is_named(tmp_path, seed):
    draw = random.Random(seed)
    found = write(tmp_path, header_of(300, 1, 2000, 64), seed=seed)
    content = bytearray(found.path.read_bytes())
    hit = draw.choice([piece for piece in found.header.pieces if piece.bytes])
    content[hit.offset + draw.randrange(hit.bytes)] ^= 1 << draw.randrange(8)
    found.path.write_bytes(content)
    for piece in found.header.pieces:
        if piece != hit:
            snapshot_file.read_piece(found.path, piece)
            continue
        named = rf"2\.snap: piece {piece.piece} of layer {piece.layer} is damaged"
        with pytest.raises(snapshot_file.SnapshotError, match=named):
            snapshot_file.read_piece(found.path, piece)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_header_is_refused(tmp_path, seed):
    draw = random.Random(seed)
    found = write(tmp_path, header_of(10, 20))
    content = bytearray(found.path.read_bytes())
    end = snapshot_file.head_length(bytes(content), name="")
    content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    found.path.write_bytes(content)
    assert list(snapshot_file.sealed_files(found.path.parent)) == []


@pytest.mark.parametrize("bit", range(64))
def test_flipped_bit_of_the_headers_length_is_refused(tmp_path, bit):
    found = write(tmp_path, header_of(10, 20))
    content = bytearray(found.path.read_bytes())
    content[8 + bit // 8] ^= 1 << bit % 8
    found.path.write_bytes(content)
    assert list(snapshot_file.sealed_files(found.path.parent)) == []


@pytest.mark.parametrize(
    "text",
    [
        *(b"no JSON", b"\xff", b"[" * 100_000, b"[]", b"{}"),
        *(b'{"pieces": 3, "progress": {}}', b'{"pieces": [3], "progress": {}}'),
    ],
    ids=["no JSON", "no text", "deep", "list", "empty", "no pieces", "no rows"],
)
@pytest.mark.usefixtures("no_collection")
def test_bytes_that_are_no_header_are_refused_despite_a_valid_checksum(tmp_path, text):
    path = tmp_path / "0.snap"
    path.write_bytes(sealing.head_of(text))
    assert list(snapshot_file.sealed_files(tmp_path)) == []
    with pytest.raises(snapshot_file.SnapshotError, match=r"0\.snap has an invalid header"):
        snapshot_file.read_header(path)


@pytest.mark.parametrize(
    "wrong",
    [{"job": ["j1"]}, {"step": "7"}, {"rank": None}, {"format": []}, {"progress": {"step": "7"}}]
    + [{"pieces": {number: value}} for number, value in enumerate(["0", None, [], 0.5, 8, 0, 5])],
    ids=str,
)
def test_header_with_a_field_of_another_type_is_refused(wrong):
    document = snapshot_file.header_document(header_of(10, 20))
    name, value = next(iter(wrong.items()))
    if name == "progress":
        document[name] |= value
    elif name == "pieces":
        number, part = next(iter(value.items()))
        document[name][1][number] = part
    else:
        document[name] = value
    with pytest.raises(snapshot_file.SnapshotError, match=r"x has an invalid header"):
        snapshot_file.header_from(document, name="x")


def test_copy_has_the_requested_pieces(tmp_path):
    found = write(tmp_path / "a", header_of(100, 0, 30, 70))
    keys = [(0, 1), (1, 1)]
    bodies = {
        p.key: snapshot_file.read_piece(found.path, p) for p in found.header.pieces if p.key in keys
    }
    folder = snapshot_file.point_folder(tmp_path / "b", "j1", generation=4, step=7)
    folder.parent.mkdir(parents=True)
    path = write_copy(folder, found.header, bodies)
    copied = snapshot_file.read_header(path)
    assert (copied.rank, copied.node, path.name) == (2, "n1", "2.snap")
    assert {p.key: snapshot_file.read_piece(path, p) for p in copied.pieces} == bodies
    assert list(snapshot_file.unfinished_files(tmp_path / "b")) == []


def test_damaged_bytes_are_not_copied(tmp_path):
    found = write(tmp_path / "a", header_of(100))
    folder = snapshot_file.point_folder(tmp_path / "b", "j1", generation=4, step=7)
    folder.parent.mkdir(parents=True)
    with pytest.raises(snapshot_file.SnapshotError, match="piece 0 of layer 0 is damaged"):
        write_copy(folder, found.header, {(0, 0): bytes(100)})
    assert (
        list(folder.parent.rglob("*.snap"))
        == list(snapshot_file.unfinished_files(tmp_path / "b"))
        == []
    )


def test_missing_room_is_reported_with_the_bytes(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(snapshot_file.NoRoomError, match=r"5\.0 MiB are needed .* MiB are free"):
            snapshot_file.create(tmp_path / "j" / "part", 5 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "j").iterdir()) == []


def test_unfinished_files_name_their_writer(tmp_path):
    path = tmp_path / "j1" / snapshot_file.part_name(4, 2, 1234, 0)
    os.close(snapshot_file.create(path, 10))
    assert path.stat().st_blocks > 0
    assert list(snapshot_file.unfinished_files(tmp_path)) == [(1234, path)]


def test_fingerprints_differ_between_models():
    spec = LogicalTensor("a", (4, 4), 0)
    one = snapshot_file.fingerprint([[spec]], atoms=2, dtype="float32", moments=2)
    assert one == snapshot_file.fingerprint(((spec,),), atoms=2, dtype="float32", moments=2)
    others = {
        snapshot_file.fingerprint(
            [[replace(spec, shape=(4, 5))]], atoms=2, dtype="float32", moments=2
        ),
        snapshot_file.fingerprint([[replace(spec, name="b")]], atoms=2, dtype="float32", moments=2),
        snapshot_file.fingerprint([[spec], []], atoms=2, dtype="float32", moments=2),
        snapshot_file.fingerprint([[spec]], atoms=1, dtype="float32", moments=2),
        snapshot_file.fingerprint([[spec]], atoms=2, dtype="float64", moments=2),
        snapshot_file.fingerprint([[spec]], atoms=2, dtype="float32", moments=1),
    }
    assert len(others | {one}) == 7
