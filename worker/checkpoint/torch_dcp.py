"""Reads and writes checkpoints of ``torch.distributed.checkpoint`` (DCP).

Weights are under ``model.NAME``, moments under ``optimizer.state.NAME``, as
``torch.distributed.checkpoint.state_dict.get_state_dict`` names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Optimizer

MOMENT_NAMES: Mapping[Optimizer, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


def write_dcp(
    kinds: list[dict[str, Tensor]], optimizer: Optimizer, *, updates: int, folder: Path
) -> None:
    """Write weights and moments, each by name, as a state dict of a module and its optimizer."""
    weights, *moments = kinds
    state: dict[str, dict[str, Tensor]] = {
        name: {
            "step": torch.tensor(float(updates)),
            **{key: each[name] for key, each in zip(MOMENT_NAMES[optimizer], moments, strict=True)},
        }
        for name in weights
    }
    whole = {"model": weights, "optimizer": {"state": state}}
    with _alone():
        save(whole, storage_writer=FileSystemWriter(folder), no_dist=True)


def read_dcp(folder: Path, optimizer: Optimizer) -> tuple[list[dict[str, Tensor]], int]:
    """Read the weights and, if there are any, the moments by name; and the optimizer's steps."""
    try:
        reader = FileSystemReader(folder)
        held = reader.read_metadata().state_dict_metadata
        keys = MOMENT_NAMES[optimizer]
        wanted = {key: each for key, each in held.items() if _is_state(key, keys)}
        found = {
            key: torch.empty(each.size, dtype=each.properties.dtype)
            for key, each in wanted.items()
            if isinstance(each, TensorStorageMetadata)
        }
        with _alone():
            load(dict[str, Any](found), storage_reader=reader, no_dist=True)
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        what = f"is not a checkpoint of torch.distributed.checkpoint ({error})"
        raise InputError(Problem(str(folder), what, "name the folder with its .metadata")) from None
    weights = _under("model.", "", found)
    if not weights:
        cure = 'save {"model": ..., "optimizer": ...} of get_state_dict'
        raise InputError(Problem(str(folder), "holds nothing under model.", cure))
    moments = [_under("optimizer.state.", f".{key}", found) for key in keys]
    steps = _under("optimizer.state.", ".step", found)
    if not any(moments):
        return [weights], 0
    return [weights, *moments], int(max((float(each) for each in steps.values()), default=0))


@contextmanager
def _alone() -> Iterator[None]:
    """Keep torch from warning that there is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_state(key: str, moments: tuple[str, ...]) -> bool:
    ends = tuple(f".{each}" for each in (*moments, "step"))
    return key.startswith("model.") or (key.startswith("optimizer.state.") and key.endswith(ends))


def _under(prefix: str, suffix: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key[len(prefix) : len(key) - len(suffix)]: value
        for key, value in found.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }
