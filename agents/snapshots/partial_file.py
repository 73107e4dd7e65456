"""Some pieces of a sealed file as a file of their own, in a stream; what is read is checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from worker.checkpoint import snapshot_file

CHUNK_BYTES = 1 << 20


def excerpt(path: Path, copy: snapshot_file.Header) -> Iterator[bytes]:
    """The bytes of ``copy``, a part of the sealed file: ``slots.copy_of`` of its header.

    ``SlotError``: the file is not any more what it was, and what was read is of no use.
    """
    with path.open("rb") as file:
        header = snapshot_file.read_header(path)
        places = {piece.key: piece for piece in header.pieces}
        head = snapshot_file.head_bytes(copy)
        yield head
        done = len(head)
        for piece in copy.pieces:
            yield bytes(piece.offset - done)
            place = places.get(piece.key)
            if place is None or place.checksum != piece.checksum:
                raise snapshot_file.SnapshotError(f"{path} is another snapshot than it was")
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
        raise snapshot_file.SnapshotError(f"{path}: {where} is damaged, or was written over")
