"""Streams some pieces of a sealed snapshot file as a file of their own, and checks them.

The file is open only while a chunk is read. So if it is deleted, its memory comes back at once,
even if the one who takes the chunks hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from worker.checkpoint import snapshot_file
from worker.plain_file import open_plain


def read_pieces(path: Path, copy: snapshot_file.Header) -> Iterator[bytes]:
    """Yield the bytes of ``copy``, which is ``snapshot_file.partial_header`` of the file's header.

    Raises ``SnapshotError`` if the file has changed meanwhile, and ``OSError`` if it was deleted;
    what was read is invalid then.
    """
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
        yield from snapshot_file.piece_chunks(partial(_read, path), place, name=str(path))
        done = piece.offset + piece.bytes


def _read(path: Path, size: int, at: int) -> bytes:
    with open_plain(path) as file:
        return os.pread(file.fileno(), size, at)
