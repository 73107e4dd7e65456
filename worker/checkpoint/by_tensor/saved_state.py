"""Reads a checkpoint one tensor at a time, whatever plan it was made under.

When it is opened, every byte is read once and every checksum verified. Objects never change, so the
tensors are not verified again.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fsspec
import torch
import xxhash
from torch import Tensor

from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document
from simulator.spec.job import Job
from worker.checkpoint import snapshot_file
from worker.checkpoint.by_tensor.piece_blocks import BLOCK_BYTES, PieceMap
from worker.checkpoint.by_tensor.tensor_strips import fill_from_block
from worker.checkpoint.compatibility import dtype_of
from worker.checkpoint.manifest import read_fields
from worker.checkpoint.placement import PieceKey
from worker.models.weight_files.foreign_tensors import ForeignTensor, TensorId, whole_tensor


class Objects:
    """Reads ranges of objects, mostly one range after the other of the same object."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._path = ""
        self._stream: Any = io.BytesIO()

    def read(self, path: str, first: int, size: int) -> bytearray:
        """Read ``size`` bytes, or fewer at the end of the object."""
        if path != self._path:
            self._stream.close()
            self._stream = self._files.open(path, "rb", block_size=_AHEAD_BYTES)
            self._path = path
        self._stream.seek(first)
        data = bytearray(size)
        del data[self._stream.readinto(data) :]
        return data


_AHEAD_BYTES = 16 * 2**20
"""Bytes of one request to an object store."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """An intact checkpoint; tensors are in memory only while they are used."""

    job: Job
    progress: snapshot_file.SavedProgress
    objects: Objects
    places: Mapping[PieceKey, tuple[str, int]]
    """The path of the object that holds a piece, and where it begins there."""

    @cached_property
    def pieces(self) -> PieceMap:
        """Where tensors are in the pieces."""
        return PieceMap(self.job)

    @property
    def kinds(self) -> range:
        """The kinds of state: the weights, then the optimizer's moments."""
        return range(self.pieces.kinds)

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors."""
        found: torch.dtype = getattr(torch, dtype_of(self.job))
        return found

    def foreign(self, tensor: ForeignTensor, kind: int) -> Tensor:
        """Return one kind of state in the form of another program's tensor."""
        whole = torch.zeros(tensor.shape, dtype=self.dtype)
        for each in tensor.tensors:
            for block in self.pieces.blocks(each, kind):
                path, begin = self.places[block.piece]
                first = begin + block.offset
                size = self.pieces.element_bytes * torch.Size(block.shape).numel()
                if size:
                    values = torch.frombuffer(self._read(path, first, size), dtype=self.dtype)
                    fill_from_block(whole, tensor, each, block, values.view(block.shape))
        return whole

    def _read(self, path: str, first: int, size: int) -> bytearray:
        try:
            return self.objects.read(path, first, size)
        except Exception as error:  # Storage backends raise any exception.
            what = f"cannot be read: {error or type(error).__name__}"
            raise InputError(Problem(path, what, "try again")) from None

    def tensor(self, tensor: TensorId, kind: int) -> Tensor:
        """Return one kind of a tensor's state in full, with padding."""
        shape = self.pieces.specs[tensor][1].shape
        return self.foreign(whole_tensor("", tensor, shape), kind)


def open_saved_state(uri: str) -> SavedCheckpoint:
    """Open and verify the checkpoint of a manifest; ``InputError`` names what cannot be used."""
    folder, _, name = uri.rpartition("/")
    try:
        files, root = fsspec.core.url_to_fs(folder)
        manifest = read_fields(files.cat_file(f"{root}/{name}"), name=uri)
        job = job_from_document(parse_document(manifest["spec"].encode(), name="job"))
        objects = Objects(files)
        places = dict(_verified_pieces(manifest, objects, root, folder))
    except InputError:
        raise
    except Exception as error:  # Storage backends raise any exception.
        cure = "find an intact one with `sailorctl checkpoint verify`"
        raise InputError(Problem(uri, str(error) or type(error).__name__, cure)) from None
    progress = snapshot_file.progress_of(manifest["progress"])
    found = SavedCheckpoint(job, progress, objects, places)
    for layer, piece in (key for key, _ in found.pieces.piece_bytes()):
        if (layer, piece) not in places:
            raise InputError(Problem(uri, f"piece {piece} of layer {layer} is missing"))
    return found


def _verified_pieces(
    manifest: Mapping[str, Any], objects: Objects, root: str, folder: str
) -> Iterator[tuple[PieceKey, tuple[str, int]]]:
    """Yield the place of every piece, each verified in the object that the manifest names."""
    for each in manifest["objects"]:
        path, place = f"{root}/{each['name']}", f"{folder}/{each['name']}"
        head = objects.read(path, 0, snapshot_file.PRELUDE.size)
        head = objects.read(path, 0, snapshot_file.head_length(head, name=place))
        header = snapshot_file.parse_head(head, name=place)
        if snapshot_file.head_checksum(head) != each["checksum"]:
            raise snapshot_file.SnapshotError(f"{place} is not the object that was committed")
        held = {
            (part["layer"], piece)
            for part in each["holds"]
            for piece in range(part["first"], part["end"])
        }
        for piece in header.pieces:
            if piece.key in held:
                _verify(objects, path, piece, place)
                yield piece.key, (path, piece.offset)


def _verify(objects: Objects, path: str, piece: snapshot_file.Piece, place: str) -> None:
    total, size, end = xxhash.xxh3_128(), 0, piece.offset + piece.bytes
    for first in range(piece.offset, end, BLOCK_BYTES):
        data = objects.read(path, first, min(BLOCK_BYTES, end - first))
        total.update(data)
        size += len(data)
    snapshot_file.check_digest(size, total.hexdigest(), piece, name=place)
