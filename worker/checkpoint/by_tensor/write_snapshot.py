"""Writes a job's whole state as one snapshot file, from tensors that come one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from simulator.spec.job import Job
from worker.checkpoint import snapshot_file
from worker.checkpoint.by_tensor.piece_blocks import BLOCK_BYTES, PieceMap
from worker.checkpoint.by_tensor.tensor_strips import block_of
from worker.checkpoint.compatibility import dtype_of, model_of
from worker.models.weight_files.foreign_tensors import ForeignTensor

ReadForeign = Callable[[ForeignTensor, int], Tensor]
"""Returns one kind of state of a foreign tensor: its weights (0) or a moment."""


def write_snapshot(
    job: Job,
    progress: snapshot_file.SavedProgress,
    tensors: Iterable[ForeignTensor],
    kinds: int,
    read: ReadForeign,
    name: str,
    out: Path,
) -> snapshot_file.Header:
    """Write a sealed file with all pieces of a job called ``name``.

    ``read`` is called once for each tensor and kind; moments beyond ``kinds`` are zero.
    """
    pieces = PieceMap(job)
    header = snapshot_file.with_offsets(
        snapshot_file.Header(
            job=name, generation=0, step=progress.step, term=0, rank=0, node="imported",
            atoms=job.max_tp, layers=len(job.model.layers) + 1, dtype=dtype_of(job),
            model=model_of(job), moments=pieces.kinds - 1, persist=True, progress=progress,
            pieces=tuple(
                snapshot_file.Piece(
                    *key, 0, size, is_written=True,
                    weights_checksum=snapshot_file.UNKNOWN if job.zero else "",
                )
                for key, size in pieces.piece_bytes()
            ),
        )
    )  # fmt: skip
    file = snapshot_file.create(out, header.total_bytes)
    try:
        _write_blocks(file, header, pieces, tensors, kinds, read)
        pieces_sealed = tuple(_with_checksums(file, header, each) for each in header.pieces)
        header = replace(header, pieces=pieces_sealed)
        snapshot_file.seal(file, header)
    except BaseException:
        out.unlink()
        raise
    finally:
        os.close(file)
    return header


def _write_blocks(
    file: int,
    header: snapshot_file.Header,
    pieces: PieceMap,
    tensors: Iterable[ForeignTensor],
    kinds: int,
    read: ReadForeign,
) -> None:
    offsets = {piece.key: piece.offset for piece in header.pieces}
    dtype: torch.dtype = getattr(torch, header.dtype)
    for foreign in tensors:
        for kind in range(kinds):
            whole = read(foreign, kind)
            for each in foreign.tensors:
                for block in pieces.blocks(each, kind):
                    values = block_of(whole, foreign, each, block, dtype)
                    write_at(file, values, offsets[block.piece] + block.offset)
            del whole  # Before the next one is read.


def write_at(file: int, values: Tensor, offset: int) -> None:
    """Write all bytes of a contiguous tensor to a file, which may take several calls."""
    if not values.numel():
        return
    rest = values.view(-1).view(torch.uint8).numpy().data
    while rest:
        done = os.pwrite(file, rest, offset)
        rest, offset = rest[done:], offset + done


def _with_checksums(
    file: int, header: snapshot_file.Header, piece: snapshot_file.Piece
) -> snapshot_file.Piece:
    whole = replace(piece, checksum=_checksum(file, piece))
    if not piece.weights_checksum:
        return whole
    return replace(whole, weights_checksum=_checksum(file, header.weights(piece)))


def _checksum(file: int, piece: snapshot_file.Piece) -> str:
    total, end = xxhash.xxh3_128(), piece.offset + piece.bytes
    for first in range(piece.offset, end, BLOCK_BYTES):
        total.update(os.pread(file, min(BLOCK_BYTES, end - first), first))
    return total.hexdigest()
