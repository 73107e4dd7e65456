"""Streams some pieces of a sealed snapshot file as a file of their own, and checks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from worker.checkpoint import snapshot_file
from worker.plain_file import open_plain

CHUNK_BYTES = 1 << 20


def read_pieces(path: Path, copy: snapshot_file.Header) -> Iterator[bytes]:
    """Yield the bytes of ``copy``, which is ``snapshot_file.partial_header`` of the file's header.

    Raises ``SnapshotError`` if the file has changed meanwhile; what was read is invalid then.
    """
    with open_plain(path) as file:
        header = snapshot_file.read_header(path)
        places = {piece.key: piece for piece in header.pieces}
        head = snapshot_file.head_bytes(copy)
        yield head
        done = len(head)
        for piece in copy.pieces:
            yield bytes(piece.offset - done)
            place = places.get(piece.key)
            if place is None or place.checksum != piece.checksum:
                raise snapshot_file.SnapshotError(f"{path} now holds another snapshot")
            yield from _checked(file.fileno(), place, path)
            done = piece.offset + piece.bytes


def _checked(file: int, piece: snapshot_file.Piece, path: Path) -> Iterator[bytes]:
    check = xxhash.xxh3_128()
    for start in range(0, piece.bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, piece.bytes - start)
        data = os.pread(file, size, piece.offset + start)
        check.update(data)
        yield data
    if check.hexdigest() != piece.checksum:
        where = f"piece {piece.piece} of layer {piece.layer}"
        raise snapshot_file.SnapshotError(f"{path}: {where} is damaged or was overwritten")
