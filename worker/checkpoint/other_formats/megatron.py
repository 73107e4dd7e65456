"""Converts checkpoints to and from Megatron-Core's ``torch_dist`` form.

It is a DCP folder with Megatron's names, beside ``common.pt`` (what is not split, such as the step)
and ``metadata.json``. Masters and moments are under ``optimizer.state.KIND.NAME``.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.checkpoint import snapshot_file
from worker.checkpoint.by_tensor.saved_state import SavedCheckpoint
from worker.checkpoint.other_formats.convert import (
    MOMENTS,
    ForeignCheckpoint,
    created_folder,
    expect_shape,
    import_tensors,
    require_adam,
)
from worker.checkpoint.other_formats.plain_pickle import load_with_stubs
from worker.checkpoint.other_formats.torch_dcp import DcpFolder, TensorEntry, write_dcp
from worker.models.weight_files.foreign_tensors import ForeignTensor, StoredTensor
from worker.models.weight_files.megatron_names import (
    LINEARS,
    Transformer,
    megatron_tensors,
    transformer_of,
)

_ABOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LATEST = "latest_checkpointed_iteration.txt"
_STATE = "optimizer.state."
_MASTERS = (f"{_STATE}fp32_param.", f"{_STATE}param.")
"""Where optimizers keep weights in fp32, if the model has fewer bits."""
_OTHERS = ("optimizer.", "rng_state", "rerun_state", "opt_param_scheduler")
_FORM = "Megatron's torch_dist form"


def export_megatron(state: SavedCheckpoint, config: Mapping[str, Any] | None, out: Path) -> None:
    """Write weights and moments in fp32; ``config`` is that of a model of transformers."""
    require_adam(state.job, _FORM)
    model = transformer_of(state.job, config)
    tensors = megatron_tensors(model)
    progress = state.progress
    with created_folder(out) as folder:
        inner = folder / f"iter_{progress.step:07d}"
        inner.mkdir()
        entries = [*_entries(state, tensors), *_extra_states(len(model.blocks))]
        write_dcp(entries, inner)
        torch.save(_common(state), inner / "common.pt")
        (inner / "metadata.json").write_text(json.dumps(_ABOUT), encoding="ascii")
        (folder / _LATEST).write_text(str(progress.step), encoding="ascii")


def _entries(state: SavedCheckpoint, tensors: Sequence[ForeignTensor]) -> Iterator[TensorEntry]:
    for kind, prefix in enumerate(("", *(f"{_STATE}{moment}." for moment in MOMENTS))):
        for each in tensors:

            def read(tensor: ForeignTensor = each, kind: int = kind) -> Tensor:
                return state.foreign(tensor, kind)

            yield TensorEntry((prefix + each.name,), each.shape, read, window=each.window)


def _extra_states(layers: int) -> Iterator[TensorEntry]:
    """Yield the empty states that Megatron's linear layers expect."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    for name in LINEARS:
        for number in range(layers):
            key = f"decoder.layers.{name}._extra_state/shard_{number}_{layers}"
            yield TensorEntry((key,), (), lambda: buffer, is_bytes=True)


def _common(state: SavedCheckpoint) -> dict[str, Any]:
    job, update = state.job, state.job.update
    groups = [
        {
            **{"lr": job.learning_rate, "max_lr": job.learning_rate, "min_lr": 0.0},
            **{"betas": tuple(update.betas), "eps": update.epsilon},
            "weight_decay": update.decay(job.optimizer) * decayed,
            # By these Megatron finds its group.
            **{"wd_mult": decayed, "lr_mult": 1.0},
            **{"is_expert_parallel": False, "is_decoupled_lr": False},
        }
        for decayed in (1.0, 0.0)  # Matrices, and then biases and norms.
    ]
    steps = torch.tensor(float(state.progress.updates))
    return {
        "checkpoint_version": 3.0,
        "iteration": state.progress.step,
        "optimizer": {"state": {"common_step": steps}, "param_groups": groups},
        "content_metadata": {},
    }


def import_megatron(
    folder: Path, job: Job, config: Mapping[str, Any] | None, name: str, out: Path
) -> snapshot_file.Header:
    """Convert a checkpoint, or the newest of a folder of them, to one snapshot file."""
    root = _root(folder)
    opened = DcpFolder(root)
    stored = opened.stored()
    weights = {key: each for key, each in stored.items() if not key.startswith(_OTHERS)}
    transformer = transformer_of(job, config)
    tensors = megatron_tensors(transformer, weights)
    known = {tensor.name for tensor in tensors}
    for key in weights:
        if key not in known and "_extra_state" not in key:
            what = f"{key} is not a tensor of the model"
            raise InputError(Problem(str(root), what, "use a checkpoint of exactly this model"))
    kinds = _kinds(root, stored, job)
    common = _common_of(root)
    _check_arguments(root, common, transformer)
    updates, samples = _updates(common), _samples(common, job)

    def read(tensor: ForeignTensor, kind: int) -> Tensor:
        if not kind:
            masters = (prefix + tensor.name for prefix in _MASTERS)
            key = next((key for key in masters if key in stored), tensor.name)
        else:
            key = f"{_STATE}{MOMENTS[kind - 1]}.{tensor.name}"
        expect_shape(str(root), key, stored.get(key), tensor)
        return opened.read(key, tensor)

    step = int(common.get("iteration", 0))
    if kinds == 1:
        updates = 0  # Moments begin at zero, and Adam corrects for that by counting updates.
    found = ForeignCheckpoint(
        str(root), weights, kinds, read, step=step, samples=samples,
        updates=step if updates is None else updates,
    )  # fmt: skip
    return import_tensors(job, found, tensors, name, out)


def _check_arguments(root: Path, common: Mapping[str, Any], model: Transformer) -> None:
    """Refuse a folder whose arguments say that equal shapes mean other weights."""
    args = common.get("args")
    heads = getattr(args, "num_attention_heads", None)
    groups = heads
    if getattr(args, "group_query_attention", False):
        groups = getattr(args, "num_query_groups", heads)
    if isinstance(heads, int) and (heads, groups) != (model.heads, model.groups):
        what = f"has {heads} heads in {groups} groups, the model {model.heads} in {model.groups}"
        raise InputError(Problem(str(root), what, "use a checkpoint of exactly this model"))
    if getattr(args, "apply_layernorm_1p", False):
        what = "stores norms less one (apply_layernorm_1p)"
        raise InputError(Problem(str(root), what, "convert it to a form of Hugging Face first"))


def _root(folder: Path) -> Path:
    """Return the folder of one checkpoint."""
    latest = folder / _LATEST
    try:
        step = latest.read_text(encoding="ascii").strip() if latest.is_file() else None
        root = folder if step is None else folder / f"iter_{int(step):07d}"
        about = json.loads((root / "metadata.json").read_text(encoding="utf-8"))
        backend = about["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"is not a distributed checkpoint of Megatron ({error})"
        cure = f"name the folder with metadata.json, or with {_LATEST}"
        raise InputError(Problem(str(folder), what, cure)) from None
    if backend != "torch_dist":
        cure = "save it with --dist-ckpt-format torch_dist"
        raise InputError(Problem(str(root), f"has the format {backend}", cure))
    return root


def _kinds(root: Path, stored: Mapping[str, StoredTensor], job: Job) -> int:
    """Return how many kinds of state the checkpoint holds."""
    if any(key.startswith(f"{_STATE}{MOMENTS[0]}.") for key in stored):
        require_adam(job, _FORM)
        return 1 + len(MOMENTS)
    if any(key.startswith("optimizer.") for key in stored):
        what = "holds an optimizer whose state is not stored by parameter"
        cure = "save it with --dist-ckpt-optim-fully-reshardable, or with --no-save-optim"
        raise InputError(Problem(str(root), what, cure))
    return 1


def _updates(common: Mapping[str, Any]) -> int | None:
    """Return the optimizer's steps, which some optimizers keep with their groups."""
    optimizer = common.get("optimizer") or {}
    inner = optimizer.get("optimizer") or optimizer
    try:
        step = (inner.get("state") or {}).get("common_step")
        groups = inner.get("param_groups") or [{}]
        step = groups[0].get("step") if step is None else step
        return None if step is None else int(step)
    except (AttributeError, TypeError, ValueError, IndexError):
        return None


def _samples(common: Mapping[str, Any], job: Job) -> int:
    """Return the samples so far, as Megatron counted them or by the steps of the job."""
    counted = getattr(common.get("args"), "consumed_train_samples", None)
    return counted if isinstance(counted, int) else int(common["iteration"]) * job.global_batch


def _common_of(root: Path) -> dict[str, Any]:
    try:
        found = load_with_stubs(root / "common.pt")
        found["iteration"] = int(found.get("iteration", 0))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, TypeError, ValueError,
            AttributeError) as error:  # fmt: skip
        what = f"cannot be read ({error})"
        raise InputError(Problem(str(root / "common.pt"), what)) from None
    assert isinstance(found, dict)
    return found
