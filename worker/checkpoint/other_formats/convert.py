"""Converts checkpoints to and from the forms of Hugging Face, torch (DCP) and DeepSpeed.

Tensors are read and written one after the other, so a checkpoint of any size needs the memory of
its largest tensors. What is imported becomes one snapshot file, from which a checkpoint is made.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.models.huggingface_config import config_of
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.checkpoint import snapshot_file
from worker.checkpoint.by_tensor.piece_blocks import whole_block
from worker.checkpoint.by_tensor.saved_state import SavedCheckpoint
from worker.checkpoint.by_tensor.tensor_strips import fill_from_block
from worker.checkpoint.by_tensor.write_snapshot import write_snapshot
from worker.checkpoint.other_formats.plain_pickle import load_tensors, load_with_stubs
from worker.checkpoint.other_formats.safetensors_file import write_safetensors
from worker.checkpoint.other_formats.torch_dcp import (
    MOMENT_NAMES,
    DcpFolder,
    order_entry,
    state_entries,
    write_dcp,
)
from worker.data.batch import FIRST_HASH
from worker.data.sample_order import other_order
from worker.models.weight_files.foreign_tensors import (
    ForeignTensor,
    StoredTensor,
    TensorId,
    check_stored,
    foreign_tensors,
    headless_prefix,
    module_name,
    present_name,
)
from worker.models.weight_files.hf_weights import open_files, stored_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
"""DeepSpeed's names for Adam's two moments."""
GROUPS_MAX = 64
"""How many parameter groups are written; DeepSpeed reads as many as the optimizer has."""
DEEPSPEED_VERSION = "0.19.8"
"""The version of the written form; it must not be below 0.3.17."""


def return_freed_memory() -> None:
    """Let this process give tensors back to the system as soon as they are freed.

    The C library would keep the room of a few of them for the next ones.
    """
    with suppress(OSError, AttributeError):  # Only glibc has it.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2**19

# ---- exports -------------------------------------------------------------------------------------


def export_huggingface(state: SavedCheckpoint, out: Path) -> None:
    """Write the weights as a folder for ``from_pretrained``, with the config of a known family."""
    tensors = {tensor.name: tensor for tensor in foreign_tensors(state.job)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with created_folder(out) as folder:
        file = folder / "model.safetensors"
        write_safetensors(file, shapes, state.dtype, lambda name: state.foreign(tensors[name], 0))
        write_config(state.job.model, state.dtype, folder)


def write_config(model: Model, dtype: torch.dtype, folder: Path) -> None:
    """Write the config.json of a model of a known family; of another model, none."""
    config = config_of(model, str(dtype).removeprefix("torch."))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def export_dcp(state: SavedCheckpoint, out: Path) -> None:
    """Write weights and moments as a checkpoint of ``torch.distributed.checkpoint``."""
    entries = state_entries(
        foreign_tensors(state.job),
        MOMENT_NAMES[state.job.optimizer],
        state.foreign,
        dtype=state.dtype,
        updates=state.progress.updates,
    )
    if state.progress.order:
        entries.append(order_entry(state.progress.order))
    with created_folder(out) as folder:
        write_dcp(entries, folder)


def export_deepspeed(state: SavedCheckpoint, out: Path) -> None:
    """Write weights and moments as DeepSpeed's universal checkpoint."""
    require_adam(state.job, "DeepSpeed's universal form")
    step = state.progress.updates
    with created_folder(out) as folder:
        tag = f"global_step{state.progress.step}_universal"
        (folder / "latest_universal").write_text(tag, encoding="ascii")
        for tensor in foreign_tensors(state.job):
            place = folder / tag / "zero" / tensor.name
            place.mkdir(parents=True)
            for kind, key in zip(state.kinds, ("fp32", *MOMENTS), strict=True):
                torch.save({"param": state.foreign(tensor, kind).float()}, place / f"{key}.pt")
            torch.save(torch.tensor(float(step)), place / "step.pt")
        groups: list[dict[str, list[int]]] = [{"params": []} for _ in range(GROUPS_MAX)]
        shared = {"ds_version": DEEPSPEED_VERSION, "param_groups": groups}
        torch.save(shared, folder / tag / "zero" / "optimizer_state.pt")
        about = {
            "module": {},
            "ds_version": DEEPSPEED_VERSION,
            "global_steps": state.progress.step,
            "global_samples": state.progress.samples,
            "skipped_steps": state.progress.step - step,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "lr_scheduler": None,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }
        torch.save(about, folder / tag / "mp_rank_00_model_states.pt")


def require_adam(job: Job, form: str) -> None:
    """Refuse an optimizer whose moments a form cannot hold."""
    if MOMENT_NAMES[job.optimizer] != MOMENTS:
        what = f"is trained with {job.optimizer}, whose moments are not Adam's"
        raise InputError(Problem("the job", what, f"{form} needs Adam or AdamW"))


@contextmanager
def mapped_weights(state: SavedCheckpoint, beside: Path) -> Iterator[Mapping[TensorId, Tensor]]:
    """Give all weights as views of a temporary file, which take no memory of their own."""
    specs = state.pieces.specs
    names = {f"{layer}/{name}": (layer, name) for layer, name in specs}
    shapes = {key: specs[each][1].shape for key, each in names.items()}
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=beside) as folder:
        path = Path(folder) / "weights.safetensors"
        write_safetensors(path, shapes, state.dtype, lambda key: state.tensor(names[key], 0))
        with safe_open(path, framework="pt") as file:
            yield {each: file.get_tensor(key) for key, each in names.items()}


def external_names(job: Job, kind: Mapping[TensorId, Tensor]) -> dict[str, Tensor]:
    """Return full tensors by Hugging Face's names, those of a user's module, or ours."""
    return {each.name: _assemble(each, kind) for each in foreign_tensors(job)}


def _assemble(tensor: ForeignTensor, kind: Mapping[TensorId, Tensor]) -> Tensor:
    whole = torch.zeros(tensor.shape, dtype=kind[tensor.tensors[0]].dtype)
    for each in tensor.tensors:
        values = kind[each].reshape(kind[each].shape or (1,))
        fill_from_block(whole, tensor, each, whole_block(values.shape), values)
    return whole


@contextmanager
def created_folder(out: Path) -> Iterator[Path]:
    """Write a new folder under a temporary name and rename it when it is complete."""
    if out.exists():
        raise InputError(Problem(str(out), "exists already", "give a new folder"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise InputError(Problem(str(out), what, "name another place")) from None
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# ---- imports -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignCheckpoint:
    """An open checkpoint of another program; its tensors are read one at a time."""

    place: str
    stored: Mapping[str, StoredTensor]
    """All weights."""
    kinds: int
    """How many kinds of state it holds: the weights, and moments."""
    read: Callable[[ForeignTensor, int], Tensor]
    step: int
    updates: int
    samples: int
    order: str = ""
    """What the order of the job's samples depends on."""


def import_huggingface(folder: Path, job: Job, name: str, out: Path) -> snapshot_file.Header:
    """Convert the weights of safetensors files to a checkpoint before the first step."""
    files = {
        key: (path, file)
        for path, file in open_files(folder).items()
        for key in file.keys()  # noqa: SIM118 - not a mapping
    }
    opened = ForeignCheckpoint(
        str(folder),
        stored_tensors({key: file for key, (_, file) in files.items()}),
        1,
        # Opened anew each time, so that pages of tensors that were read are given back.
        lambda tensor, _: read_safetensors(files[tensor.name][0], tensor.name),
        step=0,
        updates=0,
        samples=0,
    )
    return import_tensors(job, opened, foreign_tensors(job), name, out)


def read_safetensors(path: Path, name: str) -> Tensor:
    """Read a tensor of a file."""
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(name)
        return found


def import_dcp(
    folder: Path, job: Job, name: str, out: Path, *, step: int | None = None, order: str = ""
) -> snapshot_file.Header:
    """Convert a checkpoint of ``torch.distributed.checkpoint``; its step is the optimizer's.

    ``step`` is that of a checkpoint whose optimizer keeps none. Another ``order`` of samples than
    that of a checkpoint that Sailor wrote is told.
    """
    opened = DcpFolder(folder)
    stored = opened.stored()
    weights = {key.removeprefix("model."): each for key, each in stored.items()
               if key.startswith("model.")}  # fmt: skip
    if not weights:
        cure = 'save {"model": ..., "optimizer": ...} of get_state_dict'
        raise InputError(Problem(str(folder), "holds nothing under model.", cure))
    prefix, moments = "optimizer.state.", MOMENT_NAMES[job.optimizer]
    updates = _updates(opened, stored, job, step)
    has_moments = any(key.startswith(prefix) and key.endswith(moments) for key in stored)
    if updates and not has_moments and (job.optimizer != "sgd" or job.update.momentum > 0):
        what = f"holds no {moments[0]} of its optimizer, {job.optimizer}"
        cure = "use a complete checkpoint, or one of the weights alone, which begins at step 0"
        raise InputError(Problem(str(folder), what, cure))

    def key_of(tensor: ForeignTensor, kind: int) -> str:
        if not kind:
            return f"model.{tensor.name}"
        return f"{prefix}{tensor.name}.{moments[kind - 1]}"

    def read(tensor: ForeignTensor, kind: int) -> Tensor:
        key = key_of(tensor, kind)
        expect_shape(str(folder), key, stored.get(key), tensor)
        return opened.read(key)

    found = ForeignCheckpoint(
        str(folder), weights, 1 + len(moments) if has_moments else 1, read,
        step=updates, updates=updates, samples=updates * job.global_batch, order=order,
    )  # fmt: skip
    other = other_order(order, opened.order(), step=updates)
    if other:
        print(f"note: the job {name} {other}", file=sys.stderr, flush=True)
    return import_tensors(job, found, foreign_tensors(job), name, out)


def _updates(
    opened: DcpFolder, stored: Mapping[str, StoredTensor], job: Job, given: int | None
) -> int:
    """Return the optimizer's step, after a look at whose state it is."""
    place, prefix = str(opened.folder), "optimizer.state."
    kept = ("step", *MOMENT_NAMES[job.optimizer])
    state = [key for key in opened.keys if key.startswith(prefix)]
    strange = next((key for key in state if key.rpartition(".")[2] not in kept), None)
    if strange is not None:
        what = f"holds {strange}, which {job.optimizer} does not keep"
        raise InputError(Problem(place, what, "give the job the checkpoint's optimizer"))
    steps = [key for key in state if key.endswith(".step") and key in stored]
    if steps:
        found = int(max(float(opened.read(key)) for key in steps))
        if given not in (None, found):
            what = f"is {given}, and the checkpoint is of step {found}"
            raise InputError(Problem("--step", what, "leave it out"))
        return found
    if given is None and any(key.startswith("optimizer.") for key in opened.keys):
        what = "does not say its step, which SGD does not keep"
        raise InputError(Problem(place, what, "give --step N, the number of its updates"))
    return given or 0


def import_deepspeed(folder: Path, job: Job, name: str, out: Path) -> snapshot_file.Header:
    """Convert a universal checkpoint to one snapshot file; the job describes the model."""
    root, step, samples, shapes = _find_universal(folder)
    zero = root / "zero"
    files = {str(file.parent.relative_to(zero)): file for file in sorted(zero.rglob("fp32.pt"))}
    if not files:
        raise InputError(Problem(str(zero), "holds no fp32.pt", "give a universal checkpoint"))
    require_adam(job, "DeepSpeed's universal form")
    stored = {}
    for key, file in files.items():
        values = _parameter(file, shapes.get(key))
        dtype = str(values.dtype).removeprefix("torch.")
        stored[key] = StoredTensor(tuple(values.shape), dtype, values.is_floating_point())
    steps = (file.with_name("step.pt") for file in files.values())
    updates = max((_count(each) for each in steps if each.exists()), default=step)

    def read(tensor: ForeignTensor, kind: int) -> Tensor:
        file = files[tensor.name].with_name(f"{('fp32', *MOMENTS)[kind]}.pt")
        values = _parameter(file, shapes.get(tensor.name))
        if tuple(values.shape) != tuple(stored[tensor.name].shape):
            what = f"has the shape {tuple(values.shape)}, its weights {stored[tensor.name].shape}"
            raise InputError(Problem(str(file), what, "give a universal checkpoint"))
        return values

    found = ForeignCheckpoint(
        str(folder), stored, 1 + len(MOMENTS), read, step=step, updates=updates, samples=samples
    )
    return import_tensors(job, found, foreign_tensors(job), name, out)


TensorShapes = Mapping[str, tuple[int, ...]]


def _find_universal(folder: Path) -> tuple[Path, int, int, TensorShapes]:
    """Return the folder of the newest checkpoint, its step, its samples, and parameters' shapes."""
    try:
        root = folder / (folder / "latest_universal").read_text(encoding="utf-8").strip()
        states = root / "mp_rank_00_model_states.pt"
        if not states.exists():  # ZeRO stage 3 names it so.
            states = root / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        about = load_with_stubs(states)
        groups = about.get("param_shapes") or []
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        return root, int(about["global_steps"]), int(about.get("global_samples", 0)), shapes
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, EOFError,
            pickle.UnpicklingError) as error:  # fmt: skip
        what = f"is not a DeepSpeed universal checkpoint ({error})"
        cure = "make one with deepspeed/checkpoint/ds_to_universal.py"
        raise InputError(Problem(str(folder), what, cure)) from None


def _parameter(file: Path, shape: tuple[int, ...] | None) -> Tensor:
    """Return a mapped tensor; only the parts that are used are read.

    After ZeRO stage 3 the file holds the tensor alone, without its shape.
    """
    try:
        found = _load(file)
        if isinstance(found, Tensor) and shape is not None:
            return found.view(shape)
        found = found["param"]
        assert isinstance(found, Tensor), "a parameter is a tensor"
    except (KeyError, TypeError, IndexError, RuntimeError, AssertionError) as error:
        raise InputError(
            Problem(str(file), f"is not of a universal checkpoint ({error})")
        ) from None
    return found


def _count(file: Path) -> int:
    try:
        return int(_load(file))
    except (TypeError, ValueError) as error:
        raise InputError(Problem(str(file), f"holds no number ({error})")) from None


def _load(file: Path) -> Any:
    try:
        return load_tensors(file)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(Problem(str(file), f"cannot be read ({error})")) from None


def expect_shape(place: str, key: str, found: StoredTensor | None, tensor: ForeignTensor) -> None:
    """Refuse a tensor that is missing or of another shape than its weight."""
    if found is None or found.shape != tensor.stored_shape:
        what = f"has no {key} of the shape {list(tensor.stored_shape)}"
        cure = "use a complete checkpoint: all weights, and all moments or none"
        raise InputError(Problem(place, what, cure))


def _tell_left_out(job: Job, opened: ForeignCheckpoint, used: Sequence[ForeignTensor]) -> None:
    """Name the tensors of a script's model that no checkpoint of ours holds."""
    left = sorted(opened.stored.keys() - {each.name for each in used} - _shared_names(job))
    if job.model.family == "module" and left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        what = f"what the job does not train is left out: {left[0]}{more}"
        print(f"{opened.place}: {what}; the script must load it", file=sys.stderr, flush=True)


def _shared_names(job: Job) -> set[str]:
    """Return further names of tensors that layers share, under which torch stores them again."""
    return {
        module_name(job, index, tensor.name)
        for index, layer in enumerate(job.model.layers)
        for tensor in layer.tensors
        if tensor.tied_to is not None
    }


def import_tensors(
    job: Job,
    opened: ForeignCheckpoint,
    tensors: Sequence[ForeignTensor],
    name: str,
    out: Path,
) -> snapshot_file.Header:
    """Write the tensors of an open checkpoint as one snapshot file; absent moments are zero."""
    check_stored(job, tensors, opened.stored, opened.place)
    prefix = headless_prefix(job)
    named = [replace(t, name=present_name(t.name, opened.stored, prefix)) for t in tensors]
    _tell_left_out(job, opened, named)
    progress = snapshot_file.SavedProgress(
        opened.step, opened.updates, 1.0, 0, FIRST_HASH,
        opened.samples, opened.samples * job.sequence, order=opened.order,
    )  # fmt: skip
    return write_snapshot(job, progress, named, opened.kinds, opened.read, name, out)
