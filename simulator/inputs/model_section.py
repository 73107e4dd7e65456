"""Reads the [model] section: a preset, a family, a Hugging Face config or a description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from simulator.documents.fields import Table
from simulator.documents.files import load_document, parse_document
from simulator.documents.problems import InputError, Problem
from simulator.models.description_file import expand_layers, model_from_description
from simulator.models.families import FAMILIES, build_model, family_named
from simulator.models.huggingface import model_from_config
from simulator.models.layers import Model
from simulator.models.presets import preset
from simulator.models.transformer_block import MEGATRON, TORCH

SOURCES = ("preset", "family", "hf_config", "description")
NUMBERS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence"),
    *("embedding_width", "activation", "tied", "bias", "qkv_bias", "norm_first"),
    *("image", "patch", "channels", "classes"),
)
MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the TP degree."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of [training] that change the model's costs."""

    sequence: int | None
    dropout: bool
    runtime: str
    softmax: Literal["fused", "fp32"] | None = None

    def options(self) -> dict[str, Any]:
        """The options that every builder of a model takes."""
        is_megatron = self.runtime == "megatron-deepspeed"
        return {
            "kernels": replace(MEGATRON, softmax=self.softmax or MEGATRON.softmax)
            if is_megatron
            else TORCH,
            "pad_vocab_to": MEGATRON_VOCAB_MULTIPLE if is_megatron else 1,
            "dropout": self.dropout,
        }


def read_model(
    table: Table, training: TrainingSettings, undescribed: Model | None = None
) -> Model | None:
    """Read [model] apart from its profile; ``None`` if it has mistakes.

    ``undescribed`` is returned for a model that is named by ``hf`` and described later.
    """
    given = [source for source in SOURCES if source in table]
    numbers = {key: table.values[key] for key in NUMBERS if key in table}
    if "dropout" in table:
        table.report("dropout", "does not belong in [model]", "set it under [training]")
    if "script" in table and "description" not in table:
        cure = "submit the script itself, which describes its model: sailorctl submit train.py"
        table.report("script", "is given without a description", cure)
        return None
    if "hf" in table and "description" not in table:
        others = [key for key in (*SOURCES, "script", "weights", *NUMBERS) if key in table]
        if others:
            table.report("hf", f"is given together with {others[0]}", "keep one of the two")
        elif undescribed is None:
            cure = "describe it: python -m worker describe JOB > DESCRIBED"
            table.report("hf", "is given without a description", cure)
        else:
            return undescribed
        return None
    if "factory" in table:
        cure = "give the layers as one module in a script (import sailor): docs/own-model.md"
        table.report("factory", "is not supported any more", cure)
        return None
    if len(given) != 1:
        _report_source(table, given, numbers)
        return None
    source = given[0]
    if numbers and source != "family":
        keys = ", ".join(numbers)
        cure = 'numbers go with family = "..."; leave them out'
        table.problems.add(table.place, f"has {keys} together with {source}", cure)
    name = table.text(source)
    if name is None:
        return None
    if source == "preset":
        return _attempt(table, lambda: preset(name, **training.options()))
    if source == "family":
        return _attempt(table, lambda: _family(name, numbers, training))
    return _read_file(table, source, name, training)


def _report_source(table: Table, given: list[str], numbers: dict[str, object]) -> None:
    """Report that the section names no model, or several."""
    if given:
        table.problems.add(table.place, f"has {' and '.join(given)}", "keep one of them")
    elif not numbers:
        cure = 'give preset = "...", family = "..." with its numbers, or hf_config = "..."'
        table.problems.add(table.place, "names no model", cure)
    else:
        cure = f'give family = "..." ({", ".join(FAMILIES)}), or use a preset instead'
        table.problems.add(table.place, "has numbers without a family", cure)


def _family(name: str, numbers: dict[str, Any], training: TrainingSettings) -> Model:
    family = family_named(name, place="model.family")

    def build(**more: Any) -> Model:
        return build_model(family, name=family, **training.options(), **numbers, **more)

    model = build()
    rows_given = "sequence" in numbers or "image" in numbers or family == "vit"
    wanted = training.sequence
    if wanted is None or rows_given or not model.problems_with_sequence(wanted):
        return model
    # The number of learned positions was not given: make it large enough for the sequence.
    return build(sequence=wanted)


def _read_file(table: Table, source: str, name: str, training: TrainingSettings) -> Model | None:
    place = table.place_of(source)
    try:
        if source == "description" and name.startswith("{"):
            inline = parse_document(name.encode(), name="description.json")
            return model_from_description(expand_layers(dict(inline.data)))
        document = load_document(table.document.folder / name, name=name)
        if source == "description":
            return model_from_description(document.data)
        return model_from_config(document.data, **training.options())
    except InputError as error:
        table.problems.take(error, place=f"{place}:")
        return None


def _attempt(table: Table, build: Callable[[], Model]) -> Model | None:
    """Build a model, reporting mistakes in its numbers at their keys."""
    try:
        return build()
    except InputError as error:
        for problem in error.problems:
            table.report(problem.place.removeprefix("model."), problem.what, problem.cure)
        return None


def model_tp_problem(model: Model, tp: int) -> Problem | None:
    """Return why a model does not support this TP degree, with the degrees that it supports."""
    found = model.problems_with_tp(tp)
    if not found:
        return None
    fits = [str(n) for n in range(1, min(model.heads, 1024) + 1) if not model.problems_with_tp(n)]
    cure = f"possible TP degrees: {', '.join(fits)}"
    return Problem("tp", found[0].what, cure)
