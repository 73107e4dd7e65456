"""Model descriptions: a user's own model as JSON, written by a program and read back exactly.

Its keys are the fields of the classes in ``simulator.models.layers``; fields with their default
value are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.models.architecture import Architecture, Rotary
from simulator.models.layers import Layer, Model, PassPoint, TensorSpec, Term

FORMAT = "sailor-model-1"
_LEVELS_MAX = 10_000
_COUNT_MAX = 2**63

T = TypeVar("T")


def describe(model: Model) -> dict[str, Any]:
    """Return the description of a model as plain data for JSON."""
    return {"format": FORMAT, **_lean(model)}


def inline_description(model: Model) -> str:
    """Return a description as one line of JSON, short enough for a job file.

    A layer that costs the same as an earlier one has only its name, and that one's: ``like``.
    """
    first: dict[Layer, str] = {}
    layers = []
    for layer in model.layers:
        like = first.setdefault(replace(layer, name=""), layer.name)
        layers.append(_lean(layer) if like == layer.name else {"name": layer.name, "like": like})
    return json.dumps({**describe(model), "layers": layers}, separators=(",", ":"))


def _lean(value: Any) -> Any:
    """Turn dataclasses into dicts, leaving out fields with their default value."""
    if isinstance(value, Model | Layer | PassPoint | Term | TensorSpec | Architecture | Rotary):
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
        raise InputError(Problem("format", what, "write it with describe(): docs/models.md"))
    reading = _DescriptionReader(Problems())
    body = {key: value for key, value in data.items() if key != "format"}
    values = reading.record(body, Model, _readers(Model), place="")
    layers = values.get("layers") or ()
    if not reading.problems.found:
        _check_whole(layers, reading.problems)
        _check_ties(layers, reading.problems)
    reading.problems.raise_if_any()
    return Model(**values)


def expand_layers(data: dict[str, Any]) -> dict[str, Any]:
    """Give the layers of an inline description that are like an earlier one its costs."""
    problems, known, found = Problems(), dict[str, Mapping[str, Any]](), []
    layers = data.get("layers")
    if not isinstance(layers, list):
        return data  # ``model_from_description`` reports it.
    for number, given in enumerate(layers):
        layer = given
        if isinstance(given, Mapping) and "like" in given:
            like = given["like"]
            if not isinstance(like, str) or like not in known:
                what = f"is {like!r:.40}, which is not an earlier layer"
                problems.add(f"layers[{number}].like", what, nearest(str(like), known))
                continue
            layer = {**known[like], "name": given.get("name")}
        if isinstance(layer, Mapping) and isinstance(name := layer.get("name"), str):
            known[name] = layer
        found.append(layer)
    problems.raise_if_any()
    return {**data, "layers": found}


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


ReadField = Callable[["_DescriptionReader", object, str], Any]
"""Reads a value at a place, and reports what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _DescriptionReader:
    """Validates plain data and collects the problems."""

    problems: Problems

    def record(
        self,
        data: object,
        of: type,
        readers: Mapping[str, ReadField],
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


def _integer(least: int | None, *, absent: bool = False) -> ReadField:
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


def _text(*known: str, absent: bool = False) -> ReadField:
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


def _several(reader: ReadField) -> ReadField:
    def read(reading: _DescriptionReader, value: object, place: str) -> tuple[Any, ...]:
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


def _record(of: type[T], least: int | None) -> ReadField:
    readers = _readers(of, least)

    def read(reading: _DescriptionReader, value: object, place: str) -> T | None:
        before = len(reading.problems.found)
        values = reading.record(value, of, readers, place=place)
        return of(**values) if len(reading.problems.found) == before else None

    return read


def _readers(of: type, least: int | None = 0) -> dict[str, ReadField]:
    """The reader of each field of a dataclass, by the field's type."""
    hints = get_type_hints(of)
    # Moments may free kept tensors, so only their counts may be negative.
    low = None if of is PassPoint else least
    return {f.name: _reader(hints[f.name], 1 if f.name in _POSITIVE else low) for f in fields(of)}


def _reader(hint: Any, least: int | None) -> ReadField:
    absent = type(None) in get_args(hint)
    kind = next(part for part in get_args(hint) if part is not type(None)) if absent else hint
    if get_origin(kind) is Literal:
        return _text(*get_args(kind))
    if get_origin(kind) is tuple:
        return _several(_reader(get_args(kind)[0], least))
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind, least)
    return {
        str: _text(absent=absent),
        bool: _boolean,
        int: _integer(least, absent=absent),
        float: _number,
    }[kind]


_POSITIVE = {
    *("shape", "ways", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
    *("sequence_max", "embedding_width"),
}
"""Counts that are at least one."""
