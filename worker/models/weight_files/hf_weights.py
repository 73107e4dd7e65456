"""Reads weights from Hugging Face checkpoints, one rank's shard at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simulator.documents.problems import InputError, Problem, Problems
from simulator.spec.job import Job
from worker.layout.shards import Shard, shard_of, take_shard
from worker.models.weight_files.foreign_tensors import (
    StoredTensor,
    check_stored,
    headless_prefix,
    huggingface_tensors,
    present_name,
)
from worker.models.weight_files.hf_names import HfLocation, location_of
from worker.types import LogicalTensor

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """Open files that together hold every tensor of a model, in the right shapes."""

    job: Job
    # Tensor name, as in the file -> the file.
    files: Mapping[str, Any]
    prefix: str

    def values(self, index: int) -> Callable[[LogicalTensor, range], Tensor]:
        """Return the ``values`` argument of ``build_layer`` for a layer."""
        described = {tensor.name: tensor for tensor in self.job.model.layers[index].tensors}

        def read(spec: LogicalTensor, atoms: range) -> Tensor:
            place = location_of(self.job.model, index, described[spec.name])
            shard = shard_of(spec, atoms, of=self.job.max_tp)
            return self._read(place, shard, described[spec.name].shape)

        return read

    def _read(self, place: HfLocation, shard: Shard, true_shape: tuple[int, ...]) -> Tensor:
        """Read a shard; rows that pad a vocabulary are in no file and become 0."""
        name = present_name(place.name, self.files, self.prefix)
        file, columns = self.files[name], shard.columns
        end = min(shard.rows.stop, true_shape[0])
        start = min(shard.rows.start, end)
        rows = slice(place.offset + start, place.offset + end)
        across = slice(columns.start, columns.stop)
        if place.form == "reshaped":
            return take_shard(file.get_tensor(name).reshape(true_shape), shard)
        if len(true_shape) == 1:
            found = file.get_slice(name)[rows].reshape(-1, 1)
        elif place.form == "transposed":
            found = file.get_slice(name)[across, rows].T
        else:
            found = file.get_slice(name)[rows, across]
        out = torch.zeros(len(shard.rows), len(columns), dtype=found.dtype)
        out[: end - start] = found
        return out.view(shard.shape)


def open_checkpoint(path: Path, job: Job) -> HfCheckpoint:
    """Open a safetensors file or a folder of them; report whatever does not fit the model."""
    files = {name: file for file in open_files(path).values() for name in file.keys()}  # noqa: SIM118 - not a mapping
    check_stored(job, huggingface_tensors(job), stored_tensors(files), str(path))
    return HfCheckpoint(job, files, headless_prefix(job))


def stored_tensors(files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return what the headers of open files say about their tensors."""
    found = {}
    for name, file in files.items():
        part = file.get_slice(name)
        dtype = part.get_dtype()
        found[name] = StoredTensor(tuple(part.get_shape()), dtype, dtype in _FLOATS)
    return found


def open_files(path: Path) -> dict[Path, Any]:
    """Open a safetensors file, or those of a folder."""
    if path.is_dir():
        index = path / _INDEX
        paths = _read_index(index) if index.is_file() else [path / _WHOLE]
    else:
        paths = [path]
    files: dict[Path, Any] = {}
    problems = Problems()
    for each in paths:
        try:
            files[each] = safe_open(each, framework="pt")
        except FileNotFoundError:
            problems.add(str(each), "does not exist", "name a safetensors file or its folder")
        except (SafetensorError, OSError) as error:
            problems.add(str(each), f"cannot be read ({error})", "download it again")
    problems.raise_if_any()
    return files


def _read_index(index: Path) -> list[Path]:
    """Return the files that the index of a sharded checkpoint names."""
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(named)]
    except (ValueError, KeyError, AttributeError, TypeError):
        what = "does not say which file has which tensor"
        raise InputError(Problem(str(index), what, "download it again")) from None
