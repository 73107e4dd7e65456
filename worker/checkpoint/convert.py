"""Converts checkpoints to and from the forms of Hugging Face, torch (DCP) and DeepSpeed.

A checkpoint is read in full, with every checksum verified, whatever plan it was made under. What is
imported becomes one snapshot file, from which a checkpoint can be made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document, load_job
from simulator.spec.job import Job
from worker.checkpoint import snapshot_file
from worker.checkpoint.compatibility import dtype_of, model_of
from worker.checkpoint.torch_dcp import read_dcp, write_dcp
from worker.data.batch import FIRST_HASH
from worker.layout.rank_layout import TIED, FlatLayout, Tables, piece_layout
from worker.layout.tensor_table import tensors_of
from worker.models.hf_weights import (
    is_hf_model,
    open_checkpoint,
    open_files,
    to_huggingface,
)
from worker.training.optimizer import OptimizerStep
from worker.training.precision import precision_of

NamedTensors = dict[tuple[int, str], Tensor]
"""Full tensors of one kind by layer and name; shared tensors are in layer 0."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""DeepSpeed's names for Adam's two moments."""
GROUPS_MAX = 64
"""Parameter groups of an optimizer; DeepSpeed reads as many as the optimizer has."""
DEEPSPEED_VERSION = "0.19.8"
"""The version of the written form; it must not be below 0.3.17."""


@dataclass(frozen=True, slots=True)
class FullCheckpoint:
    """A checkpoint as full tensors, independent of the plan."""

    job: Job
    progress: snapshot_file.SavedProgress
    kinds: tuple[NamedTensors, ...]
    """The master weights, then the optimizer's moments."""


# ---- reading checkpoints -------------------------------------------------------------------------


def read_checkpoint(uri: str) -> FullCheckpoint:
    """Read the checkpoint of a manifest; ``InputError`` names what cannot be used."""
    folder, _, name = uri.rpartition("/")
    try:
        files, root = fsspec.core.url_to_fs(folder)
        manifest = _manifest(files.cat_file(f"{root}/{name}"), uri)
        job = job_from_document(parse_document(manifest["spec"].encode(), name="job"))
        bodies = dict(_read_pieces(manifest, lambda *span: _read(files, root, *span), folder))
    except (OSError, snapshot_file.SnapshotError, ImportError, KeyError) as error:
        cure = "find an intact one with `sailorctl checkpoint verify`"
        raise InputError(Problem(uri, str(error) or type(error).__name__, cure)) from None
    progress = snapshot_file.SavedProgress(**manifest["progress"])
    return FullCheckpoint(job, progress, _assemble(job, bodies, dtype=manifest["dtype"], place=uri))


def _manifest(data: bytes, uri: str) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        expected = manifest["sha256"]
        dtype_name = json.dumps({**manifest, "sha256": ""}, sort_keys=True, separators=(",", ":"))
    except (ValueError, KeyError, TypeError):
        raise snapshot_file.SnapshotError(f"{uri} is not a manifest, or is truncated") from None
    if hashlib.sha256(dtype_name.encode()).hexdigest() != expected:
        raise snapshot_file.SnapshotError(f"{uri} is damaged: its hash does not match")
    assert isinstance(manifest, dict)
    return manifest


def _read(files: Any, root: str, name: str, first: int, size: int) -> bytes:
    return bytes(files.cat_file(f"{root}/{name}", start=first, end=first + size))


def _read_pieces(
    manifest: Mapping[str, Any], read: Callable[[str, int, int], bytes], folder: str
) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Yield every piece, read from the object that the manifest names for it."""
    for each in manifest["objects"]:
        name, place = each["name"], f"{folder}/{each['name']}"
        head = read(name, 0, snapshot_file.PRELUDE.size)
        length = snapshot_file.head_length(head, name=place)
        head = read(name, 0, length)
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
                data = read(name, piece.offset, piece.bytes)
                snapshot_file.check_piece(data, piece, name=place)
                yield piece.key, data


def _assemble(
    job: Job, bodies: Mapping[tuple[int, int], bytes], *, dtype: str, place: str
) -> tuple[NamedTensors, ...]:
    layers, moments = len(job.model.layers), OptimizerStep.moment_count(job)
    tables = tensors_of(job)
    kinds: tuple[NamedTensors, ...] = tuple({} for _ in range(1 + moments))
    parts: dict[tuple[int, int, str], list[Tensor]] = {}
    for layer, specs in tables.items():
        for piece in range(job.max_tp + 1):
            image = piece_layout(specs, piece, atoms=job.max_tp)
            body = bodies.get((snapshot_file.layer_number(layer, layers=layers), piece))
            if body is None:
                raise InputError(Problem(place, f"piece {piece} of layer {layer} is missing"))
            flats = _flats(body, image, count=len(kinds), dtype=dtype)
            for kind, flat in enumerate(flats):
                for slot in image.slots:
                    part = flat[slot.offset : slot.offset + slot.elements].view(slot.shape)
                    parts.setdefault((kind, layer, slot.spec.name), []).append(part)
        for spec in specs:
            for kind, named in enumerate(kinds):
                found = parts.pop((kind, layer, spec.name))
                whole = found[0] if spec.split_dim is None else torch.cat(found, spec.split_dim)
                named[0 if layer == TIED else layer, spec.name] = whole
    return kinds


def _flats(body: bytes, image: FlatLayout, *, count: int, dtype: str) -> list[Tensor]:
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    if not image.elements:
        return [torch.empty(0, dtype=kind)] * count
    return list(torch.frombuffer(bytearray(body), dtype=kind).view(count, image.elements))


# ---- exports -------------------------------------------------------------------------------------


def external_names(job: Job, kind: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors by Hugging Face's names, those of a user's module, or ours."""
    if is_hf_model(job):
        return to_huggingface(job, kind)
    if job.model.family == "module":
        return {module_name(job, *key): tensor.contiguous() for key, tensor in kind.items()}
    return {f"{layer}/{name}": tensor.contiguous() for (layer, name), tensor in kind.items()}


def module_name(job: Job, index: int, name: str) -> str:
    """Return a user's module's name of a layer's parameter."""
    layer = job.model.layers[index]
    return f"{layer.name}.{name}" if layer.kind == "block" else name


def export_dcp(whole: FullCheckpoint, out: Path) -> None:
    """Write weights and moments as a checkpoint of ``torch.distributed.checkpoint``."""
    kinds = [external_names(whole.job, kind) for kind in whole.kinds]
    with created_folder(out) as folder:
        updates = whole.progress.updates
        write_dcp(kinds, whole.job.optimizer, updates=updates, folder=folder)


def export_huggingface(whole: FullCheckpoint, out: Path) -> None:
    """Write the weights as a folder for ``from_pretrained``; config.json must be added."""
    with created_folder(out) as folder:
        metadata = {"format": "pt"}
        save_file(external_names(whole.job, whole.kinds[0]), folder / "model.safetensors", metadata)


def export_deepspeed(whole: FullCheckpoint, out: Path) -> None:
    """Write weights and moments as DeepSpeed's universal checkpoint."""
    if len(whole.kinds) != 1 + len(MOMENTS):
        what = f"is trained with {whole.job.optimizer}, whose moments are not Adam's"
        raise InputError(Problem("the job", what, "DeepSpeed's universal form needs Adam or AdamW"))
    step = whole.progress.updates
    with created_folder(out) as folder:
        tag = f"global_step{whole.progress.step}_universal"
        (folder / "latest_universal").write_text(tag, encoding="ascii")
        for key, kind in zip(("fp32", *MOMENTS), whole.kinds, strict=True):
            for name, tensor in external_names(whole.job, kind).items():
                place = folder / tag / "zero" / name
                place.mkdir(parents=True, exist_ok=True)
                torch.save({"param": tensor.float().clone()}, place / f"{key}.pt")
                torch.save(torch.tensor(float(step)), place / "step.pt")
        groups: list[dict[str, list[int]]] = [{"params": []} for _ in range(GROUPS_MAX)]
        state = {"ds_version": DEEPSPEED_VERSION, "param_groups": groups}
        torch.save(state, folder / tag / "zero" / "optimizer_state.pt")
        about = {
            "module": {},
            "ds_version": DEEPSPEED_VERSION,
            "global_steps": whole.progress.step,
            "global_samples": whole.progress.samples,
            "skipped_steps": whole.progress.step - step,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "lr_scheduler": None,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }
        torch.save(about, folder / tag / "mp_rank_00_model_states.pt")


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


def import_deepspeed(folder: Path, job_file: Path, name: str, out: Path) -> snapshot_file.Header:
    """Convert a universal checkpoint to one snapshot file; the job file describes the model."""
    job = load_job(job_file)
    root, step, samples = _universal(folder)
    updates = step
    kinds = []
    for key in ("fp32", *MOMENTS):
        found, updates = _read_universal(root / "zero", key)
        kinds.append(found)
    progress = snapshot_file.SavedProgress(
        step, updates, 1.0, 0, FIRST_HASH, samples, samples * job.sequence
    )
    return _write_named(job, kinds, progress, name, out)


def import_dcp(folder: Path, job_file: Path, name: str, out: Path) -> snapshot_file.Header:
    """Convert a checkpoint of ``torch.distributed.checkpoint``; its step is the optimizer's."""
    job = load_job(job_file)
    kinds, step = read_dcp(folder, job.optimizer)
    samples = step * job.global_batch
    progress = snapshot_file.SavedProgress(
        step, step, 1.0, 0, FIRST_HASH, samples, samples * job.sequence
    )
    return _write_named(job, kinds, progress, name, out)


def import_huggingface(folder: Path, job_file: Path, name: str, out: Path) -> snapshot_file.Header:
    """Convert the weights of safetensors files to a checkpoint before the first step."""
    job = load_job(job_file)
    files = open_files(folder)
    found = {key: file.get_tensor(key) for key, file in files.items()}
    progress = snapshot_file.SavedProgress(0, 0, 1.0, 0, FIRST_HASH, 0, 0)
    return _write_named(job, [found], progress, name, out)


def _write_named(
    job: Job,
    kinds: list[dict[str, Tensor]],
    progress: snapshot_file.SavedProgress,
    name: str,
    out: Path,
) -> snapshot_file.Header:
    """Write weights and moments, given by foreign names; absent moments are zero."""
    named = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, found in enumerate(kinds):
            file = Path(temporary) / f"{number}.safetensors"
            save_file({key: value.contiguous() for key, value in found.items()}, file)
            named.append(_to_our_names(job, file, found))
    zeros = {key: torch.zeros_like(value) for key, value in named[0].items()}
    absent = 1 + OptimizerStep.moment_count(job) - len(named)
    whole = FullCheckpoint(job, progress, (*named, *[zeros] * absent))
    return write_full(whole, name, out)


def _universal(folder: Path) -> tuple[Path, int, int]:
    try:
        root = folder / (folder / "latest_universal").read_text(encoding="utf-8").strip()
        about = torch.load(root / "mp_rank_00_model_states.pt", weights_only=False)
        return root, int(about["global_steps"]), int(about.get("global_samples", 0))
    except (OSError, KeyError, RuntimeError, EOFError) as error:
        what = f"is not a DeepSpeed universal checkpoint ({error})"
        cure = "make one with deepspeed/checkpoint/ds_to_universal.py"
        raise InputError(Problem(str(folder), what, cure)) from None


def _read_universal(zero: Path, key: str) -> tuple[dict[str, Tensor], int]:
    found: dict[str, Tensor] = {}
    updates = 0
    for file in sorted(zero.rglob(f"{key}.pt")):
        saved = torch.load(file, weights_only=False)
        found[str(file.parent.relative_to(zero))] = saved["param"].float().contiguous()
        if (step := file.with_name("step.pt")).exists():
            updates = int(torch.load(step, weights_only=False))
    if not found:
        raise InputError(Problem(str(zero), f"holds no {key}.pt", "give a universal checkpoint"))
    return found, updates


def _to_our_names(job: Job, file: Path, found: Mapping[str, Tensor]) -> NamedTensors:
    named: NamedTensors = {}
    tables = tensors_of(job)
    for layer, specs in tables.items():
        index = 0 if layer == TIED else layer
        if is_hf_model(job):
            values = open_checkpoint(file, job).values(index)
            named |= {(index, spec.name): values(spec, range(job.max_tp)) for spec in specs}
            continue
        for spec in specs:
            is_module = job.model.family == "module"
            theirs = module_name(job, index, spec.name) if is_module else f"{index}/{spec.name}"
            if theirs not in found or tuple(found[theirs].shape) != spec.shape:
                what = f"has no {theirs} of the shape {list(spec.shape)}"
                raise InputError(Problem("the checkpoint", what, "use one of exactly this model"))
            named[index, spec.name] = found[theirs]
    return named


def write_full(whole: FullCheckpoint, name: str, out: Path) -> snapshot_file.Header:
    """Write full tensors as one sealed file with all pieces."""
    job, layers = whole.job, len(whole.job.model.layers)
    tables, dtype = tensors_of(job), precision_of(job).master
    bodies = {
        (snapshot_file.layer_number(layer, layers=layers), piece): _body(
            whole, tables, layer, piece, dtype
        )
        for layer in tables
        for piece in range(job.max_tp + 1)
    }
    pieces = tuple(
        snapshot_file.Piece(*key, 0, len(body), snapshot_file.checksum(body), is_written=True)
        for key, body in sorted(bodies.items())
    )
    header = snapshot_file.with_offsets(
        snapshot_file.Header(
            job=name, generation=0, step=whole.progress.step, term=0, rank=0, node="imported",
            atoms=job.max_tp, layers=layers + 1, dtype=dtype_of(job), model=model_of(job),
            moments=OptimizerStep.moment_count(job),
            persist=True, progress=whole.progress, pieces=pieces,
        )
    )  # fmt: skip
    file = snapshot_file.create(out, header.total_bytes)
    with open(file, "r+b", closefd=True) as stream:
        for piece in header.pieces:
            stream.seek(piece.offset)
            stream.write(bodies[piece.key])
        stream.flush()
        snapshot_file.seal(stream.fileno(), header)
    return header


def _body(
    whole: FullCheckpoint, tables: Tables, layer: int, piece: int, dtype: torch.dtype
) -> bytes:
    """Return the bytes of a piece: the weights, then each moment."""
    atoms = whole.job.max_tp
    image = piece_layout(tables[layer], piece, atoms=atoms)
    flats = torch.zeros(len(whole.kinds), image.elements, dtype=dtype)
    for flat, named in zip(flats, whole.kinds, strict=True):
        for slot in image.slots:
            values = named[0 if layer == TIED else layer, slot.spec.name]
            dim = slot.spec.split_dim
            if dim is not None:
                each = slot.spec.shape[dim] // atoms
                values = values.narrow(dim, piece * each, each)
            flat[slot.offset : slot.offset + slot.elements] = values.flatten()
    return flats.numpy().tobytes()
