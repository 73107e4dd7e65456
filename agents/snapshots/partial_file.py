"""Streams some pieces of a sealed snapshot file as a file of their own, and checks them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from worker.checkpoint import snapshot_file
from worker.plain_file import open_plain


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
            yield from snapshot_file.piece_chunks(file.fileno(), place, name=str(path))
            done = piece.offset + piece.bytes
