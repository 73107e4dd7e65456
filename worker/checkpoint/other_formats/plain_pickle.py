"""Reads pickles in other programs' checkpoints without running anything that they name.

Tensors and plain values are made; an object of another class is refused or becomes a stub.
"""

from __future__ import annotations

import pickle
import posixpath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals


class _Sealed(type):
    """A class whose attributes a pickle cannot set, since the process would keep them."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it changes {cls.__name__}.{name}")


class _Given(metaclass=_Sealed):
    """What a pickle says about an object; the object is made of it afterwards."""

    __slots__ = ("state",)

    state: Any

    def __setstate__(self, state: Any) -> None:
        """Keep the state as it is."""
        self.state = state


class _Metadata(_Given):
    __slots__ = ()


class _Index(_Given):
    __slots__ = ()


class _StorageMeta(_Given):
    __slots__ = ()


class _Properties(_Given):
    __slots__ = ()


class _TensorMetadata(_Given):
    __slots__ = ()


class _BytesMetadata(_Given):
    __slots__ = ()


class _Chunk(_Given):
    __slots__ = ()


class _Place(_Given):
    __slots__ = ()


class _PathText(metaclass=_Sealed):
    """Makes the text of a path."""

    __slots__ = ()

    def __new__(cls, *parts: str) -> str:  # type: ignore[misc] # makes a text
        return posixpath.join("", *parts)


_DCP = "torch.distributed.checkpoint.metadata"
# Nothing in here can be changed: a pickle may set attributes of whatever it names. Kinds of
# memory are numbers, layouts are names and sizes are tuples until ``_metadata_of``.
_DCP_NAMES: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): _Metadata,
    (_DCP, "MetadataIndex"): _Index,
    (_DCP, "StorageMeta"): _StorageMeta,
    (_DCP, "TensorProperties"): _Properties,
    (_DCP, "TensorStorageMetadata"): _TensorMetadata,
    (_DCP, "BytesStorageMetadata"): _BytesMetadata,
    (_DCP, "ChunkStorageMetadata"): _Chunk,
    (_DCP, "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): _PathText,
    ("pathlib", "Path"): _PathText,
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
    """Read a file of ``torch.save``, mapped, in which objects of other classes become stubs."""
    stubs: list[tuple[Any, str] | Any] = [
        (type(name.rpartition(".")[2], (_Stub,), {}), name)
        for name in get_unsafe_globals_in_checkpoint(file)
    ]
    with safe_globals(stubs):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


class _DcpUnpickler(pickle.Unpickler):
    """Makes the objects of DCP's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _DCP_NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def _state_of(given: Any, kind: type[_Given]) -> dict[str, Any]:
    if type(given) is not kind or type(given.state) is not dict:
        raise TypeError(f"{type(given).__name__} is not {kind.__name__}")
    state: dict[str, Any] = given.state
    return state


def _metadata_of(given: Any) -> dcp.Metadata:
    """Make the metadata; raises what wrong types lead to."""
    state = _state_of(given, _Metadata)
    about = {key: _about(each) for key, each in state["state_dict_metadata"].items()}
    places = {
        _index_of(key): _place_of(_state_of(each, _Place))
        for key, each in state["storage_data"].items()
    }
    found = dcp.Metadata(about, state.get("planner_data"), places, version=state.get("version"))
    meta = state.get("storage_meta")
    found.storage_meta = dcp.StorageMeta(**({} if meta is None else _state_of(meta, _StorageMeta)))
    return found


def _about(given: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if type(given) is _BytesMetadata:
        return dcp.BytesStorageMetadata()
    state = _state_of(given, _TensorMetadata)
    chunks = [_state_of(each, _Chunk) for each in state["chunks"]]
    return dcp.TensorStorageMetadata(
        _properties_of(state["properties"]),
        torch.Size(state["size"]),
        [
            dcp.ChunkStorageMetadata(torch.Size(each["offsets"]), torch.Size(each["sizes"]))
            for each in chunks
        ],
    )


def _properties_of(given: Any) -> dcp.TensorProperties:
    if type(given) is not _Properties:
        raise TypeError(f"{type(given).__name__} is not a mapping of properties")
    dtype, layout, requires_grad, memory_format, pin_memory = given.state
    if type(dtype) is not torch.dtype:
        raise TypeError(f"{dtype!r} is not a type of numbers")
    found = dcp.TensorProperties(dtype)
    if type(layout) is str:
        layout = _get_layout(layout)  # type: ignore[no-untyped-call] # of torch
    kind = dcp._MEM_FORMAT_ENCODING(memory_format)
    state = (dtype, layout, bool(requires_grad), kind, bool(pin_memory))
    found.__setstate__(state)  # type: ignore[no-untyped-call] # of torch
    return found


def _index_of(given: Any) -> dcp.MetadataIndex:
    state = _state_of(given, _Index)
    return dcp.MetadataIndex(state["fqn"], state.get("offset"), state.get("index"))


def _place_of(state: dict[str, Any]) -> _StorageInfo:
    path = state["relative_path"]
    if type(path) is not str:
        raise TypeError("a file's name is not text")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"it names a file outside the folder: {path!r}")
    return _StorageInfo(path, state["offset"], state["length"], state.get("transform_descriptors"))


class DcpReader(FileSystemReader):
    """Reads a DCP folder; torch's own reader runs what the metadata names."""

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Read the metadata; raises ``UnpicklingError`` and ``ValueError``."""
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                found = _metadata_of(_DcpUnpickler(file).load())
        except (AttributeError, LookupError, OverflowError, TypeError) as error:
            raise pickle.UnpicklingError(f"its metadata is of another kind: {error}") from None
        assert found.storage_meta is not None
        found.storage_meta.load_id = self.load_id
        return found
