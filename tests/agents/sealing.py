"""Writes real sealed snapshot files without a worker."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from worker.checkpoint import snapshot_file

MOMENTS = 2


def write_snapshot(
    memory: Path,
    *,
    job: str = "job",
    generation: int = 1,
    step: int,
    rank: int = 0,
    node: str = "a.1.1",
    pieces: dict[tuple[int, int], bytes] | None = None,
    written: bool = True,
    buddy: str | None = None,
    persist: bool = False,
) -> snapshot_file.Header:
    """Write and seal a file with these pieces."""
    contents = pieces or {(0, 0): b"weights and moments" * 100, (1, 1): bytes(5000)}
    header = snapshot_file.with_offsets(
        snapshot_file.Header(
            job=job,
            generation=generation,
            step=step,
            term=1,
            rank=rank,
            node=node,
            atoms=2,
            layers=2,
            dtype="float32",
            moments=MOMENTS,
            model="none",
            persist=persist,
            progress=snapshot_file.SavedProgress(step, step, 1.0, 0, "", 0, 0),
            pieces=tuple(
                snapshot_file.Piece(
                    *key, 0, len(data), snapshot_file.checksum(data), written, buddy
                )
                for key, data in contents.items()
            ),
        )
    )
    folder = snapshot_file.point_folder(memory, job, generation=generation, step=step)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{rank}.new").open("w+b") as file:
        for piece in header.pieces:
            os.pwrite(file.fileno(), contents[piece.key], piece.offset)
        os.pwrite(file.fileno(), snapshot_file.head_bytes(header), 0)
    (folder / f".{rank}.new").rename(folder / header.file_name)
    return header


def head_of(text: bytes) -> bytes:
    """Return the beginning of a sealed file whose header is this text, whatever it is."""
    digest = xxhash.xxh3_128_digest(text)
    return snapshot_file.PRELUDE.pack(snapshot_file.MAGIC, len(text), digest) + text
