"""Model descriptions: a user's own model as JSON, written by a program and read back exactly.

Its keys are the fields of the classes in ``simulator.models.layers``; fields with their default
value are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_args

from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.models.architecture import NONLINEARITIES, Architecture, Rotary
from simulator.models.layers import Item, Layer, LayerKind, Model, Moment, TensorSpec, Term, When

FORMAT = "sailor-model-1"
_LEVELS_MAX = 10_000
_COUNT_MAX = 2**63

T = TypeVar("T")


def describe(model: Model) -> dict[str, Any]:
    """Return the description of a model as plain data for JSON."""
    return {"format": FORMAT, **_lean(model)}


def _lean(value: Any) -> Any:
    """Turn dataclasses into dicts, leaving out fields with their default value."""
    if isinstance(value, Model | Layer | Moment | Term | TensorSpec | Architecture | Rotary):
        return {
            f.name: _lean(item)
            for f in fields(value)
            if (item := getattr(value, f.name)) != f.default
        }
    if isinstance(value, tuple):
        return [_lean(item) for item in value]
    return value


def model_from_description(data: object) -> Model:
    """Read a model from its description; raise ``InputError`` with all mistakes."""
    if not isinstance(data, Mapping):
        raise InputError(Problem("", "is not a table of keys", "give a model description"))
    if data.get("format") != FORMAT:
        what = f"is {data.get('format')!r}, not {FORMAT!r}"
        raise InputError(Problem("format", what, "write it with `sailorctl profile model`"))
    reading = _DescriptionReader(Problems())
    body = {key: value for key, value in data.items() if key != "format"}
    values = reading.record(body, Model, _MODEL, place="")
    layers = values.get("layers") or ()
    if not reading.problems.found:
        _check_whole(layers, reading.problems)
        _check_ties(layers, reading.problems)
    reading.problems.raise_if_any()
    return Model(**values)


def _check_whole(layers: Sequence[Layer], problems: Problems) -> None:
    kinds = [layer.kind for layer in layers]
    middle = kinds[1:-1]
    if len(kinds) < 3 or kinds[0] != "embedding" or kinds[-1] != "head" or set(middle) != {"block"}:
        what = "are not an embedding, then blocks, then a head"
        problems.add("layers", what, "reorder them; a final norm belongs to the head")
    names = [layer.name for layer in layers]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add("layers", f'have the name "{name}" more than once', "give each its own")
    for number, layer in enumerate(layers):
        if not layer.moments:
            problems.add(f"layers[{number}].moments", "is empty", "give at least one moment")
        if not layer.kept:
            problems.add(f"layers[{number}].kept", "is empty", "measure what autograd keeps")


def _check_ties(layers: Sequence[Layer], problems: Problems) -> None:
    shapes = {f"{layer.name}/{t.name}": t.shape for layer in layers for t in layer.tensors}
    for number, layer in enumerate(layers):
        for position, tensor in enumerate(layer.tensors):
            place = f"layers[{number}].tensors[{position}]"
            if tensor.split_dim is not None and tensor.split_dim >= len(tensor.shape):
                what = f"is {tensor.split_dim}, but the tensor has {len(tensor.shape)} dimensions"
                problems.add(f"{place}.split_dim", what, "count dimensions from 0")
            if tensor.tied_to is None:
                continue
            if tensor.tied_to not in shapes:
                cure = nearest(tensor.tied_to, shapes)
                problems.add(f"{place}.tied_to", f'there is no tensor "{tensor.tied_to}"', cure)
            elif shapes[tensor.tied_to] != tensor.shape:
                problems.add(f"{place}.tied_to", "has another shape", "tie equal tensors only")


@dataclass(frozen=True, slots=True)
class _DescriptionReader:
    """Validates plain data and collects the problems."""

    problems: Problems

    def record(
        self,
        data: object,
        of: type,
        readers: Mapping[str, Callable[[_DescriptionReader, object, str], Any]],
        *,
        place: str,
    ) -> dict[str, Any]:
        """Read one table into the fields of a dataclass."""
        if not isinstance(data, Mapping):
            self.problems.add(place, f"is {data!r:.40}", "give a table of keys")
            return {}
        at = f"{place}." if place else ""
        required = {f.name for f in fields(of) if f.default is MISSING}
        for key in data:
            if key not in readers:
                self.problems.add(f"{at}{key}", "is not known here", nearest(str(key), readers))
        for key in readers:
            if key in required and key not in data:
                self.problems.add(f"{at}{key}", "is missing", "see docs/models.md")
        return {
            key: reader(self, data[key], f"{at}{key}")
            for key, reader in readers.items()
            if key in data
        }


def _integer(
    least: int | None, *, absent: bool = False
) -> Callable[[_DescriptionReader, object, str], Any]:
    def read(reading: _DescriptionReader, value: object, place: str) -> int | None:
        low = -_COUNT_MAX if least is None else least
        if absent and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _COUNT_MAX:
            cure = "give an integer" if least is None else f"give an integer of at least {least}"
            reading.problems.add(place, f"is {value!r:.40}", cure)
        return value  # type: ignore[return-value]  # a wrong value is reported and never used

    return read


def _number(reading: _DescriptionReader, value: object, place: str) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        reading.problems.add(place, f"is {value!r:.40}", "give a number of at least 0")
    return value


def _text(*known: str, absent: bool = False) -> Callable[[_DescriptionReader, object, str], Any]:
    def read(reading: _DescriptionReader, value: object, place: str) -> object:
        if absent and value is None:
            return None
        if not isinstance(value, str) or not value:
            reading.problems.add(place, f"is {value!r:.40}", "give a text")
        elif known and value not in known:
            reading.problems.add(place, f'is "{value}"', nearest(value, known))
        return value

    return read


def _boolean(reading: _DescriptionReader, value: object, place: str) -> object:
    if not isinstance(value, bool):
        reading.problems.add(place, f"is {value!r:.40}", "give true or false")
    return value


def _several(
    reader: Callable[[_DescriptionReader, object, str], T],
) -> Callable[[_DescriptionReader, object, str], tuple[T, ...]]:
    def read(reading: _DescriptionReader, value: object, place: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            reading.problems.add(place, f"is {value!r:.40}", "give a list")
            return ()
        if len(value) > _LEVELS_MAX:
            reading.problems.add(place, f"has {len(value)} entries", f"at most {_LEVELS_MAX}")
            return ()
        return tuple(
            reader(reading, item, f"{place}[{position}]") for position, item in enumerate(value)
        )

    return read


def _record(
    of: type[T], readers: Mapping[str, Callable[[_DescriptionReader, object, str], Any]]
) -> Callable[[_DescriptionReader, object, str], T | None]:
    def read(reading: _DescriptionReader, value: object, place: str) -> T | None:
        before = len(reading.problems.found)
        values = reading.record(value, of, readers, place=place)
        return of(**values) if len(reading.problems.found) == before else None

    return read


def _term(least: int | None) -> Callable[[_DescriptionReader, object, str], Term | None]:
    count = _integer(least)
    return _record(
        Term,
        {
            "name": _text(),
            "fixed": count,
            "per_sample": count,
            "per_token": count,
            "per_pair": count,
            "ways": _integer(1),
            "item": _text(*get_args(Item)),
            "when": _text(*get_args(When)),
        },
    )


_TENSOR = {
    "name": _text(),
    "shape": _several(_integer(1)),
    "split_dim": _integer(0, absent=True),
    "ways": _integer(1),
    "tied_to": _text(absent=True),
}
# Moments may free kept tensors, so only their counts may be negative.
_MOMENT = {"name": _text(), "terms": _several(_term(None))}
_LAYER = {
    "name": _text(),
    "kind": _text(*get_args(LayerKind)),
    "tensors": _several(_record(TensorSpec, _TENSOR)),
    "flops": _several(_term(0)),
    "kept": _several(_term(0)),
    "checkpoint": _several(_term(0)),
    "moments": _several(_record(Moment, _MOMENT)),
    "traffic": _several(_term(0)),
    "output_per_token": _integer(0),
    "allreduces_forward": _integer(0),
    "allreduces_backward": _integer(0),
    "allreduce_per_token": _integer(0),
}
_ROTARY = {
    "base": _number,
    "factor": _number,
    "low_frequency": _number,
    "high_frequency": _number,
    "original_tokens": _integer(0),
}
_ARCHITECTURE = {
    "head_dim": _integer(1),
    "nonlinearity": _text(*NONLINEARITIES),
    "embedding_width": _integer(1),
    "rms_norm": _boolean,
    "norm_first": _boolean,
    "norm_epsilon": _number,
    "scaled_scores": _boolean,
    "windows": _several(_integer(0)),
    "position_offset": _integer(0),
    "rotary": _record(Rotary, _ROTARY),
    "image": _integer(0),
    "patch": _integer(0),
    "channels": _integer(0),
}
_MODEL = {
    "name": _text(),
    "family": _text(),
    "layers": _several(_record(Layer, _LAYER)),
    "hidden": _integer(1),
    "heads": _integer(1),
    "kv_heads": _integer(1),
    "ffn": _integer(1),
    "vocab": _integer(1),
    "sequence_max": _integer(1),
    "learned_positions": _boolean,
    "tied": _boolean,
    "architecture": _record(Architecture, _ARCHITECTURE),
}
