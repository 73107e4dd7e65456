"""Reads weights from Hugging Face checkpoints, one rank's shard at a time, and writes them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simulator.documents.problems import InputError, Problem, Problems
from simulator.models.layers import Model, TensorSpec
from simulator.spec.job import Job
from worker.layout.shards import Shard, shard_of, take_shard
from worker.models.hf_names import HfLocation, is_ignored, location_of, prefix_of
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
        name = _present(place.name, self.files, self.job.model)
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
    files = open_files(path)
    problems = Problems()
    wanted = {place.name: place for _, _, place in _places(job.model)}
    used = set()
    for place in wanted.values():
        name = _present(place.name, files, job.model)
        used.add(name)
        if name not in files:
            cure = "use a checkpoint of this model"
            if name == "lm_head.weight":
                cure = "the checkpoint ties it to the embedding: set tied = true"
            problems.add(name, "is missing", cure)
            continue
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != place.shape:
            what = f"has shape {_shown(found.get_shape())}, the model's is {_shown(place.shape)}"
            problems.add(name, what, "give the model's own numbers in the job, or its config.json")
        elif found.get_dtype() not in _FLOATS:
            what = f"holds {found.get_dtype()}, not floating-point numbers"
            problems.add(name, what, "dequantise the checkpoint first")
    for name in sorted(set(files) - used):
        if not is_ignored(job.model, name):
            problems.add(
                name, "is not a tensor of the model", "use a checkpoint of exactly this model"
            )
    if problems.found:
        located = Problems()
        located.take(InputError(problems.found), place=f"{path}:")
        located.raise_if_any()
    return HfCheckpoint(job, files)


def _places(model: Model) -> Iterator[tuple[int, TensorSpec, HfLocation]]:
    for index, layer in enumerate(model.layers):
        for tensor in layer.tensors:
            yield index, tensor, location_of(model, index, tensor)


def _present(name: str, files: Mapping[str, Any], model: Model) -> str:
    """Return the name in these files, without its prefix if the model was saved headless."""
    body = name.removeprefix(prefix_of(model))
    return body if name not in files and body in files else name


def _shown(shape: Any) -> str:
    return " x ".join(str(size) for size in shape)


def open_files(path: Path) -> dict[str, Any]:
    """Open a safetensors file or a folder of them; return the file of each tensor."""
    if path.is_dir():
        index = path / _INDEX
        paths = _indexed(index) if index.is_file() else [path / _WHOLE]
    else:
        paths = [path]
    files: dict[str, Any] = {}
    problems = Problems()
    for each in paths:
        try:
            file = safe_open(each, framework="pt")
        except FileNotFoundError:
            problems.add(str(each), "does not exist", "name a safetensors file or its folder")
        except (SafetensorError, OSError) as error:
            problems.add(str(each), f"cannot be read ({error})", "download it again")
        else:
            files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]  # a foreign function
    problems.raise_if_any()
    return files


def _indexed(index: Path) -> list[Path]:
    """Return the files that the index of a sharded checkpoint names."""
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(named)]
    except (ValueError, KeyError, AttributeError, TypeError):
        what = "does not say which file has which tensor"
        raise InputError(Problem(str(index), what, "download it again")) from None


def is_hf_model(job: Job) -> bool:
    """Return whether Hugging Face has a name for every tensor of the job's model."""
    try:
        return len(list(_places(job.model))) > 0
    except InputError:
        return False


def to_huggingface(job: Job, tensors: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    """Convert full tensors, keyed by (layer, name), to Hugging Face's names and shapes.

    Vocabulary padding is dropped, and a tied tensor is written once.
    """
    found: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for index, tensor, place in _places(job.model):
        if tensor.tied_to is not None:
            continue
        own = tensors[index, tensor.name][: tensor.shape[0]]
        shaped = own.T if place.form == "transposed" else own
        parts.setdefault(place.name, []).append(shaped)
        found[place.name] = shaped if place.form != "reshaped" else own.reshape(place.shape)
    for name, together in parts.items():
        if len(together) > 1:
            found[name] = torch.cat(together, -1)
    return {name: tensor.contiguous() for name, tensor in found.items()}
