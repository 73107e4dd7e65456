"""Maps our tensors to those in other programs' checkpoints; without torch.

A foreign tensor holds one of ours or several, side by side along one dimension (a fused query, key
and value, for example), as it is or transposed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from simulator.documents.problems import InputError, Problem, Problems
from simulator.spec.job import Job
from worker.layout.rank_layout import TIED
from worker.layout.tensor_table import tensors_of
from worker.models.weight_files.hf_names import HfLocation, is_ignored, location_of, prefix_of

TensorId = tuple[int, str]
"""The layer and the name of one of our tensors; shared tensors are in layer 0."""


@dataclass(frozen=True, slots=True)
class Strip:
    """A range of one of our tensors along a dimension, and where it begins in a foreign tensor."""

    tensor: TensorId
    dim: int
    span: range
    begin: int


@dataclass(frozen=True, slots=True)
class Window:
    """The place of a tensor in a larger one, which may have more dimensions in front."""

    offset: tuple[int, ...]
    stored_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of another program's checkpoint, as strips of ours."""

    name: str
    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    dim: int = 0
    """The strips are side by side along this dimension; those of another one are transposed."""
    viewed: tuple[int, ...] | None = None
    """The shape of the same elements in which the strips are counted, if it is another."""
    window: Window | None = None
    """Its place in a larger stored tensor."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return self.shape if self.window is None else self.window.stored_shape

    @property
    def tensors(self) -> tuple[TensorId, ...]:
        """Our tensors that it holds, wholly or partly."""
        return tuple(dict.fromkeys(strip.tensor for strip in self.strips))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a checkpoint says about one of its tensors."""

    shape: tuple[int, ...]
    dtype: str
    is_float: bool


def foreign_tensors(job: Job) -> tuple[ForeignTensor, ...]:
    """Return all tensors by Hugging Face's names, those of a user's module, or ours.

    Frozen parameters are not among them, and a tied tensor is there once.
    """
    if is_hf_model(job):
        return huggingface_tensors(job)
    found = []
    for layer, specs in tensors_of(job).items():
        index = 0 if layer == TIED else layer
        is_module = job.model.family == "module"
        for spec in specs:
            name = module_name(job, index, spec.name) if is_module else f"{index}/{spec.name}"
            found.append(whole_tensor(name, (index, spec.name), spec.shape))
    return tuple(found)


def whole_tensor(name: str, tensor: TensorId, shape: tuple[int, ...]) -> ForeignTensor:
    """Return a foreign tensor that is one of ours; a scalar is a row of one."""
    rows, viewed = (range(shape[0]), None) if shape else (range(1), (1,))
    return ForeignTensor(name, shape, (Strip(tensor, 0, rows, 0),), viewed=viewed)


def module_name(job: Job, index: int, name: str) -> str:
    """Return a user's module's name of a layer's parameter."""
    layer = job.model.layers[index]
    return f"{layer.name}.{name}" if layer.kind == "block" else name


def is_hf_model(job: Job) -> bool:
    """Return whether Hugging Face has a name for every tensor of the job's model."""
    try:
        return len(huggingface_tensors(job)) > 0
    except InputError:
        return False


def huggingface_tensors(job: Job) -> tuple[ForeignTensor, ...]:
    """Return the tensors of Hugging Face; vocabularies are not padded there."""
    found: dict[str, tuple[HfLocation, tuple[int, ...], list[Strip]]] = {}
    for index, layer in enumerate(job.model.layers):
        for tensor in layer.tensors:
            if tensor.tied_to is not None:
                continue
            place = location_of(job.model, index, tensor)
            strips = found.setdefault(place.name, (place, tensor.shape, []))[2]
            strips.append(Strip((index, tensor.name), 0, range(tensor.shape[0]), place.offset))
    return tuple(
        ForeignTensor(
            name,
            place.shape,
            tuple(strips),
            dim=1 if place.form == "transposed" else 0,
            viewed=shape if place.form == "reshaped" else None,
        )
        for name, (place, shape, strips) in found.items()
    )


def check_stored(
    job: Job, wanted: Iterable[ForeignTensor], stored: Mapping[str, StoredTensor], place: str
) -> None:
    """Raise ``InputError`` with all stored tensors that are missing, unknown or do not fit."""
    problems, used = Problems(), set()
    prefix = headless_prefix(job)
    for tensor in {each.name: each for each in wanted}.values():
        name = present_name(tensor.name, stored, prefix)
        used.add(name)
        found = stored.get(name)
        if found is None:
            cure = "use a checkpoint of this model"
            if name == "lm_head.weight":
                cure = "the checkpoint ties it to the embedding: set tied = true"
            problems.add(name, "is missing", cure)
        elif found.shape != tensor.stored_shape:
            model_shape = _describe_shape(tensor.stored_shape)
            shown = f"{_describe_shape(found.shape)}, the model's is {model_shape}"
            cure = "give the model's own numbers in the job, or its config.json"
            problems.add(name, f"has shape {shown}", cure)
        elif not found.is_float:
            what = f"holds {found.dtype}, not floating-point numbers"
            problems.add(name, what, "dequantise the checkpoint first")
    for name in sorted(set(stored) - used) if is_hf_model(job) else ():
        if not is_ignored(job.model, name):
            what = "is not a tensor of the model"
            problems.add(name, what, "use a checkpoint of exactly this model")
    if problems.found:
        more = len(problems.found) - _PROBLEMS_MAX
        shown_problems = problems.found[:_PROBLEMS_MAX]
        if more > 0:
            shown_problems.append(Problem("", f"and {more} more tensors do not fit"))
        located = Problems()
        located.take(InputError(shown_problems), place=f"{place}:")
        located.raise_if_any()


_PROBLEMS_MAX = 12


def headless_prefix(job: Job) -> str:
    """Return the prefix of names that checkpoints of the model without its head leave out."""
    return prefix_of(job.model) if is_hf_model(job) else ""


def present_name(name: str, stored: Container[str], prefix: str) -> str:
    """Return the name in these files: without the prefix if the model was saved headless."""
    body = name.removeprefix(prefix)
    return body if name not in stored and body in stored else name


def _describe_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
