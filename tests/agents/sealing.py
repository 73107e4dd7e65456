"""Real sealed files, made without a worker."""

from __future__ import annotations

import os
from pathlib import Path

from worker import slots

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
) -> slots.Header:
    """Seal a file of these pieces, each with its bytes."""
    contents = pieces or {(0, 0): b"weights and moments" * 100, (1, 1): bytes(5000)}
    header = slots.laid_out(
        slots.Header(
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
            progress=slots.Progress(step, step, 1.0, 0, "", 0, 0),
            pieces=tuple(
                slots.Piece(*key, 0, len(data), slots.checksum(data), written, buddy)
                for key, data in contents.items()
            ),
        )
    )
    folder = slots.point_folder(memory, job, generation=generation, step=step)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{rank}.new").open("w+b") as file:
        for piece in header.pieces:
            os.pwrite(file.fileno(), contents[piece.key], piece.offset)
        os.pwrite(file.fileno(), slots.head_bytes(header), 0)
    (folder / f".{rank}.new").rename(folder / header.file_name)
    return header
