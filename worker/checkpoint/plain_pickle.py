"""Reads pickles in other programs' checkpoints without running anything that they name.

Tensors and plain values are made; an object of any other class becomes a stub with its attributes.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals

_DCP_CLASSES = (
    *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorProperties),
    *(dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata),
    *(dcp._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size),
)
_DCP_NAMES: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in _DCP_CLASSES},
    # Enumerations and properties that older versions of torch wrote under a longer name.
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): dcp.TensorProperties,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "Path"): PurePosixPath,
    ("collections", "OrderedDict"): dict,
    **{
        ("torch", name): each
        for name, each in vars(torch).items()
        if isinstance(each, torch.dtype | torch.layout | torch.memory_format)
    },
}


class _Stub(SimpleNamespace):
    """Stands for an object of a class that is not made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Keep attributes; what other states mean is not known here."""
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_tensors(file: Path) -> Any:
    """Read a file of ``torch.save``, mapped; raises ``UnpicklingError`` for other classes."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def load_with_stubs(file: Path) -> Any:
    """Read a file of ``torch.save`` in which objects of other classes become stubs."""
    stubs: list[tuple[Any, str] | Any] = [
        (type(name.rpartition(".")[2], (_Stub,), {}), name)
        for name in get_unsafe_globals_in_checkpoint(file)
    ]
    with safe_globals(stubs):
        return torch.load(file, map_location="cpu", weights_only=True)


class _DcpUnpickler(pickle.Unpickler):
    """Makes the objects of DCP's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _DCP_NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


class DcpReader(FileSystemReader):
    """Reads a DCP folder; torch's own reader runs what the metadata names."""

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Read the metadata; raises ``UnpicklingError`` and ``ValueError``."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _DcpUnpickler(file).load()
        if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("its metadata is of another kind")
        for each in found.storage_data.values():
            place = PurePath(str(getattr(each, "relative_path", "..")))
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"it names a file outside the folder: {str(place)!r}")
        found.storage_meta = getattr(found, "storage_meta", None) or dcp.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
