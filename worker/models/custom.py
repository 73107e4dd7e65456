"""Custom models: a user's function that returns the full layers, without parallelism.

``module:function`` is called without arguments and returns a list. Each entry is a layer
(``torch.nn.Module``) or, better for large models, a function without arguments that makes one: then
a rank makes only the layers that it holds. A layer takes one tensor, the output of the layer before
it. The first takes token ids (batch, sequence), the last returns logits over the vocabulary.

A layer class may declare what may be split (``splits``, see ``worker.layout.split_spec``), into how
many pieces at most if fewer than its size (``pieces``: submodule name -> number of key heads, for
example), and which of its parameters are those of layer 0 (``tied``: own name -> name there).
"""

from __future__ import annotations

import copy
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from simulator.documents.problems import InputError, Problem, Problems
from simulator.models.layers import TensorSpec
from simulator.spec.job import Job
from worker.layout.split_spec import splits_of
from worker.models.counter_rng import stream_key

_PLACE = "model.factory"
# torch draws initial weights from one generator that all threads share.
_drawing = threading.Lock()

LayerEntry = nn.Module | Callable[[], nn.Module]


def custom_layer(job: Job, index: int) -> nn.Module:
    """Make one full layer on the CPU, with the weights that its own code sets."""
    assert job.factory is not None, "a custom model has a factory"
    with _drawing, torch.random.fork_rng(devices=[]):
        entry = _entries(job.factory, job.data.seed)[index]
        if isinstance(entry, nn.Module):
            # Its parts will be replaced by a rank's shards.
            return copy.deepcopy(entry)
        torch.manual_seed(stream_key("factory", job.data.seed, index)[0])
        return _layer(entry, index)


@functools.lru_cache(maxsize=1)
def _entries(factory: str, seed: int) -> Sequence[LayerEntry]:
    torch.manual_seed(stream_key("factory", seed)[0])
    return _call_factory(factory)


def _call_factory(factory: str) -> Sequence[LayerEntry]:
    module, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        cure = "put its folder on Python's path: PYTHONPATH=FOLDER"
        what = f"{factory} cannot be imported ({error})"
        raise InputError(Problem(_PLACE, what, cure)) from error
    try:
        made = function()
    except Exception as error:
        what = f"{factory} failed ({type(error).__name__}: {error})"
        raise InputError(Problem(_PLACE, what, "it is called without arguments")) from error
    if not isinstance(made, Sequence) or not made:
        what = f"{factory} returned {_describe(made)}, not a list of layers"
        raise InputError(Problem(_PLACE, what, "return the embedding, the blocks, then the head"))
    return made


def _layer(entry: object, index: int) -> nn.Module:
    made = entry() if callable(entry) and not isinstance(entry, nn.Module) else entry
    if not isinstance(made, nn.Module):
        what = f"has {_describe(made)} as layer {index}"
        cure = "give a torch.nn.Module, or a function without arguments that makes one"
        raise InputError(Problem(_PLACE, what, cure))
    return made


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r:.40}"


def described_tensors(layer: nn.Module, *, first: str) -> tuple[TensorSpec, ...]:
    """Return a layer's tensors as in a model description; ``first`` is the name of layer 0."""
    pieces: Mapping[str, int] = getattr(layer, "pieces", {})
    tied: Mapping[str, str] = getattr(layer, "tied", {})
    splits = splits_of(layer)
    found = []
    for name, parameter in layer.named_parameters():
        path, _, kind = name.rpartition(".")
        dim = {"columns": 0, "vocabulary": 0, "rows": 1}.get(splits.get(path, ""))
        if dim == 1 and kind == "bias":
            dim = None
        ways = 1 if dim is None else pieces.get(path, parameter.shape[dim])
        owner = f"{first}/{tied[name]}" if name in tied else None
        found.append(TensorSpec(name, tuple(parameter.shape), dim, ways, owner))
    return tuple(found)


def check_factory(job: Job) -> None:
    """Report every problem of a custom model's layers before any rank starts."""
    assert job.factory is not None, "a job without a factory has nothing to check"
    layers = []
    problems = Problems()
    with torch.device("meta"):
        for index, entry in enumerate(_call_factory(job.factory)):
            try:
                layers.append(_layer(entry, index))
            except InputError as error:
                problems.found.extend(error.problems)
    problems.raise_if_any()
    described = job.model.layers
    if len(layers) != len(described):
        what = f"makes {len(layers)} layers, the description has {len(described)}"
        raise InputError(Problem(_PLACE, what, _DESCRIBE_AGAIN))
    for index, layer in enumerate(layers):
        problems.found.extend(_problems_with_layer(job, index, layer))
    problems.found.extend(_undeclared_sharing(layers))
    problems.found.extend(_problems_with_chain(job, layers))
    problems.raise_if_any()


_DESCRIBE_AGAIN = "describe the model again with `sailorctl profile model`"


def _problems_with_layer(job: Job, index: int, layer: nn.Module) -> Iterator[Problem]:
    at = f"{_PLACE}: layer {index}"
    modules = dict(layer.named_modules())
    for path, split_kind in splits_of(layer).items():
        part = modules.get(path)
        fitting = _SPLITTABLE.get(split_kind)
        if fitting is None:
            yield Problem(
                at,
                f"{path} has the unknown split kind {split_kind!r}",
                f"known are {', '.join(_SPLITTABLE)}",
            )
        elif part is not None and not isinstance(part, fitting):
            names = " or ".join(kind.__name__ for kind in fitting)
            yield Problem(
                at, f"{path} is a {type(part).__name__}", f"{split_kind} needs nn.{names}"
            )
    made = {
        tensor.name: tensor for tensor in described_tensors(layer, first=job.model.layers[0].name)
    }
    described = {tensor.name: tensor for tensor in job.model.layers[index].tensors}
    for name in sorted(made.keys() | described.keys()):
        if made.get(name) != described.get(name):
            yield Problem(at, f"{name} is not as described", _DESCRIBE_AGAIN)
    for name, tensor in made.items():
        how = splits_of(layer).get(name.rpartition(".")[0])
        if how in ("columns", "rows") and tensor.split_dim is not None:
            fewer = how == "columns" and job.max_tp % tensor.ways == 0
            if tensor.ways % job.max_tp and not fewer:
                what = f"{name} has {tensor.ways} pieces, not divisible by TP degree {job.max_tp}"
                yield Problem(at, what, "lower max_tp, or leave it out of splits")


_SPLITTABLE: dict[str, tuple[type[nn.Module], ...]] = {
    "columns": (nn.Linear,),
    "rows": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "entry": (nn.Identity,),
    "heads": (nn.Dropout,),
}


def _undeclared_sharing(layers: Sequence[nn.Module]) -> Iterator[Problem]:
    """Find undeclared shared parameters; layers are made separately, so they must be declared."""
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        tied: Mapping[str, str] = getattr(layer, "tied", {})
        for name, parameter in layer.named_parameters():
            first = owner.setdefault(id(parameter), index)
            if first != index and name not in tied:
                what = f"{name} is also a parameter of layer {first}"
                cure = "declare it in the class: tied = {own name: name in layer 0}"
                yield Problem(f"{_PLACE}: layer {index}", what, cure)


def _problems_with_chain(job: Job, layers: Sequence[nn.Module]) -> Iterator[Problem]:
    """Pass a tensor's shape through all layers; for images the shape is not known yet."""
    if job.data.kind == "images":
        return
    x = torch.zeros(1, job.sequence, dtype=torch.int64, device="meta")
    for index, layer in enumerate(layers):
        at = f"{_PLACE}: layer {index}"
        given = "token ids" if index == 0 else f"what layer {index - 1} returns"
        try:
            with torch.no_grad():
                out = layer(x)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            what = f"does not take {given}, {_shape(x)} ({type(error).__name__}: {reason})"
            yield Problem(at, what, "each layer takes what the one before it returns")
            return
        if not isinstance(out, Tensor):
            yield Problem(at, f"returns {_describe(out)}", "return one tensor")
            return
        x = out
    wanted = (1, job.sequence, job.model.vocab)
    if tuple(x.shape) != wanted:
        what = f"returns {_shape(x)}, not logits of {' x '.join(map(str, wanted))}"
        yield Problem(f"{_PLACE}: layer {len(layers) - 1}", what, "the last layer is the head")


def _shape(x: Tensor) -> str:
    return " x ".join(str(size) for size in x.shape)
