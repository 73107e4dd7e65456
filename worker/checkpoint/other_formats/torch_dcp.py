"""Reads and writes checkpoints of ``torch.distributed.checkpoint`` (DCP), one tensor at a time.

Weights are under ``model.NAME``, moments under ``optimizer.state.NAME``, as
``torch.distributed.checkpoint.state_dict.get_state_dict`` names them.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Optimizer
from worker.checkpoint.other_formats.plain_pickle import DcpReader
from worker.models.weight_files.foreign_tensors import ForeignTensor, StoredTensor, Window

MOMENT_NAMES: Mapping[Optimizer, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


ORDER = "sailor.order"
"""The key of what the order of the samples depends on: a text, as bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written: its path in the state dict, its form, and how to read it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor | BytesIO]
    dtype: torch.dtype = torch.float32
    window: Window | None = None
    """Its place in a larger tensor of that path."""
    is_bytes: bool = False
    """It is an object, already serialized."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


def write_dcp(entries: Sequence[TensorEntry], folder: Path) -> None:
    """Write the tensors of a state dict; each is read when its turn comes."""
    planner = _LazyPlanner(entries)
    with _alone():
        save({}, storage_writer=_StreamWriter(folder), planner=planner, no_dist=True)


class _StreamWriter(FileSystemWriter):
    """Writes one file; torch's own writer keeps every tensor until the last is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, name = [], "__0_0.distcp"
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                begin = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                del data  # Before the next one is read.
                size = file.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _LazyPlanner(DefaultSavePlanner):
    """Plans to write tensors that are not in memory."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        super().__init__()
        self._entries = {_index_of(entry): entry for entry in entries}

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(index, entry) for index, entry in self._entries.items()]
        self.plan = SavePlan(items, planner_data={e.key: e.path for e in self._entries.values()})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        found = self._entries[write_item.index].read()
        if isinstance(found, BytesIO) or write_item.tensor_data is None:
            return found
        return found.view(write_item.tensor_data.chunk.sizes)


def _index_of(entry: TensorEntry) -> MetadataIndex:
    if entry.is_bytes:
        return MetadataIndex(entry.key)
    return MetadataIndex(entry.key, _region(entry.shape, entry.window).offsets)


def _write_item(index: MetadataIndex, entry: TensorEntry) -> WriteItem:
    if entry.is_bytes:
        return WriteItem(index, WriteItemType.BYTE_IO)
    size = entry.shape if entry.window is None else entry.window.stored_shape
    about = TensorWriteData(
        _region(entry.shape, entry.window), TensorProperties(entry.dtype), torch.Size(size)
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=about)


def _region(shape: tuple[int, ...], window: Window | None) -> ChunkStorageMetadata:
    """Return the place of a tensor of this shape in the stored one."""
    offset = window.offset if window is not None else tuple(0 for _ in shape)
    ones = (1,) * (len(offset) - len(shape))
    return ChunkStorageMetadata(torch.Size(offset), torch.Size((*ones, *shape)))


class DcpFolder:
    """An open DCP folder, of which tensors are read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = DcpReader(folder)
        with _reading(folder):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def keys(self) -> list[str]:
        """The keys of everything that is stored."""
        return list(self._metadata.state_dict_metadata)

    def stored(self) -> dict[str, StoredTensor]:
        """Return what the folder says about its tensors."""
        return {
            key: StoredTensor(
                tuple(each.size),
                str(each.properties.dtype).removeprefix("torch."),
                each.properties.dtype.is_floating_point,
            )
            for key, each in self._metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def order(self) -> str:
        """Return what the order of the samples depends on, if the folder says so."""
        return bytes(self.read(ORDER).tolist()).decode() if ORDER in self.stored() else ""

    def read(self, key: str, tensor: ForeignTensor | None = None) -> Tensor:
        """Read a stored tensor, or the part of it that ``tensor`` names."""
        about = self._metadata.state_dict_metadata[key]
        assert isinstance(about, TensorStorageMetadata), "asked for what stored() has"
        shape = tuple(about.size) if tensor is None else tensor.shape
        region = _region(shape, None if tensor is None else tensor.window)
        chunks = _Chunks(region.sizes)
        plan = LoadPlan(create_read_items_for_chunk_list(key, about, [region]))
        with _reading(self.folder):
            self._reader.read_data(plan, chunks).wait()
        wanted = math.prod(region.sizes)
        if chunks.elements != wanted:
            what = f"lacks {wanted - chunks.elements:,} of the {wanted:,} elements of {key}"
            cure = "save it anew, with the shards of all ranks"
            raise InputError(Problem(str(self.folder), what, cure))
        found = chunks.whole
        if found is None:
            found = torch.empty(region.sizes, dtype=about.properties.dtype)  # It has no elements.
        return found.reshape(shape)


class _Chunks(DefaultLoadPlanner):
    """Takes the chunks that a reader has loaded: a single one as it is, others by copying."""

    def __init__(self, size: torch.Size) -> None:
        super().__init__()
        self._size = size
        self.whole: Tensor | None = None
        self.elements = 0
        """How many were taken; chunks do not overlap."""

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        return _Target(self, read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Nothing is left to do."""

    def take(self, item: ReadItem, values: Tensor) -> None:
        """Keep the values of a part of the region that is read."""
        self.elements += values.numel()
        if item.lengths == self._size:
            self.whole = values
            return
        if self.whole is None:
            self.whole = torch.empty(self._size, dtype=values.dtype)
        found = self.whole
        for dim, (first, count) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            found = found.narrow(dim, first, count)
        found.copy_(values)


@dataclass(frozen=True, slots=True)
class _Target:
    """Stands for the tensor into which the reader copies, so that none is there twice."""

    chunks: _Chunks
    item: ReadItem

    def detach(self) -> _Target:
        return self

    def size(self) -> torch.Size:
        return self.item.lengths

    def copy_(self, values: Tensor) -> None:
        self.chunks.take(self.item, values)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (
        *(OSError, CheckpointException, RuntimeError, ValueError, EOFError, KeyError),
        *(AssertionError, pickle.UnpicklingError),
    ) as error:
        what = f"is not a checkpoint of torch.distributed.checkpoint ({error})"
        raise InputError(Problem(str(folder), what, "name the folder with its .metadata")) from None


@contextmanager
def _alone() -> Iterator[None]:
    """Keep torch from warning that there is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def state_entries(
    tensors: Sequence[ForeignTensor],
    kinds: Sequence[str],
    read: Callable[[ForeignTensor, int], Tensor],
    *,
    dtype: torch.dtype,
    updates: int,
) -> list[TensorEntry]:
    """Return the entries of the state dict of a module and its optimizer."""
    found = [
        TensorEntry(("model", t.name), t.shape, _read_later(read, t, 0), dtype) for t in tensors
    ]
    for tensor in tensors:
        at = ("optimizer", "state", tensor.name)
        found.append(TensorEntry((*at, "step"), (), lambda: torch.tensor(float(updates))))
        for number, kind in enumerate(kinds, start=1):
            values = _read_later(read, tensor, number)
            found.append(TensorEntry((*at, kind), tensor.shape, values, dtype))
    return found


def order_entry(order: str) -> TensorEntry:
    """Return the entry of what the order of the samples depends on."""
    text = torch.tensor(list(order.encode()), dtype=torch.uint8)
    return TensorEntry(tuple(ORDER.split(".")), tuple(text.shape), lambda: text, text.dtype)


def _read_later(
    read: Callable[[ForeignTensor, int], Tensor], tensor: ForeignTensor, kind: int
) -> Callable[[], Tensor]:
    return lambda: read(tensor, kind)
