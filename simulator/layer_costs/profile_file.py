"""Read and write profile files; the published format is recognised by its content."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.arrays import Floats
from simulator.documents.fields import (
    InvalidValue,
    Table,
    open_table,
    quote,
    valid_number,
    valid_text,
)
from simulator.documents.files import Document
from simulator.documents.problems import InputError, Problems
from simulator.hardware.catalogue import Catalogue
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.layer_costs.published_profile import profile_from_json
from simulator.models.layers import PRECISIONS, Precision

FORM = "sailor_profile"
VERSION = 1


def read_profile(document: Document, *, catalogue: Catalogue) -> Profile:
    """Read a profile in either format, reporting every mistake in it at once."""
    if FORM not in document.data:
        return profile_from_json(document.data, place=document.name, catalogue=catalogue)
    problems = Problems()
    top = open_table(document, problems)
    profile = _profile(top, catalogue)
    problems.raise_if_any()
    assert profile is not None
    return profile


def _profile(top: Table, catalogue: Catalogue) -> Profile | None:
    version = top.integer(FORM, least=1, required=True)
    if version is not None and version > VERSION:
        top.report(FORM, f"is version {version}", f"this Sailor reads version {VERSION}; update it")
    model = top.text("model", required=True)
    sequence = top.integer("sequence", least=1, required=True)
    precision: Precision = top.choice("precision", PRECISIONS, default="fp32")
    flash = top.flag("flash_attention", default=False)
    head_makes_logits = top.flag("head_makes_logits", default=True)
    names = top.value("layers", _names, required=True)
    count = len(names) if names is not None else None
    sizes, parameters = _sizes(top, count)
    timings = _timings(top, count, catalogue)
    top.finish()
    if names is None or model is None or sequence is None or top.problems.found:
        return None
    return Profile(
        name=model,
        sequence=sequence,
        precision=precision,
        layer_names=names,
        timings=timings,
        sizes=sizes,
        optimizer_parameters=parameters,
        config={"head_has_vocab_projection": head_makes_logits},
        flash_attention=flash,
    )


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidValue(f"is {quote(value)}", "give a list of names: embedding, blocks, head")
    if len(value) < 2:
        raise InvalidValue(
            "has fewer than two layers", "a model has at least an embedding and a head"
        )
    return tuple(value)


def _sizes(top: Table, count: int | None) -> tuple[dict[int, LayerSizes], dict[int, int]]:
    sizes: dict[int, LayerSizes] = {}
    optimizer_parameters: dict[int, int] = {}
    for table in top.tables("sizes", required=True):
        tp = table.integer("tp", least=1, required=True)
        rows = [
            _row(table, key, count, least=0.0)
            for key in ("parameters", "output_elements", "kept_elements")
        ]
        timed = table.integer("optimizer_parameters", least=1)
        table.finish()
        if tp is None or any(row is None for row in rows):
            continue
        parameters, outputs, kept = (tuple(round(v) for v in row or ()) for row in rows)
        sizes[tp] = LayerSizes(parameters, outputs, kept)
        optimizer_parameters[tp] = timed if timed is not None else sum(parameters)
    return sizes, optimizer_parameters


def _timings(
    top: Table, count: int | None, catalogue: Catalogue
) -> dict[tuple[str, int, int], Timing]:
    def kind(value: Any) -> str:
        try:
            return catalogue.gpu_name(valid_text(value))
        except InputError as error:
            raise InvalidValue(error.problems[0].what, error.problems[0].cure) from None

    timings: dict[tuple[str, int, int], Timing] = {}
    for table in top.tables("timings", required=True):
        gpu = table.value("gpu", kind, required=True)
        tp = table.integer("tp", least=1, required=True)
        micro_batch = table.integer("micro_batch", least=1, required=True)
        forward = _row(table, "forward_s", count, above=0.0)
        backward = _row(table, "backward_s", count, least=0.0)
        step = table.number("optimizer_s", above=0)
        note = table.text("note", default="")
        table.finish()
        if gpu is None or tp is None or micro_batch is None:
            continue
        if forward is None or backward is None:
            continue
        if (gpu, tp, micro_batch) in timings:
            table.report("micro_batch", "is given twice for this GPU and TP", "keep one of the two")
        timings[gpu, tp, micro_batch] = Timing(
            np.array(forward), np.array(backward), step, (note,) if note else ()
        )
    return timings


def _row(
    table: Table,
    key: str,
    count: int | None,
    *,
    least: float | None = None,
    above: float | None = None,
) -> list[float] | None:
    def accept(value: Any) -> list[float]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise InvalidValue(
                f"is {quote(value)}", f"give one number for each of the {count} layers"
            )
        return [valid_number(item, least, above, None, None) for item in value]

    return table.value(key, accept, required=True)


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Return the profile in Sailor's format."""

    def numbers(row: Floats) -> list[float]:
        return [float(value) for value in row]

    return {
        FORM: VERSION,
        "model": profile.name,
        "sequence": profile.sequence,
        "precision": profile.precision,
        "flash_attention": profile.flash_attention,
        "head_makes_logits": bool(profile.config.get("head_has_vocab_projection", True)),
        "layers": list(profile.layer_names),
        "sizes": [
            {
                "tp": tp,
                "parameters": list(sizes.parameters),
                "output_elements": list(sizes.output_elements),
                "kept_elements": list(sizes.kept_elements),
                "optimizer_parameters": profile.optimizer_parameters.get(tp, sum(sizes.parameters)),
            }
            for tp, sizes in sorted(profile.sizes.items())
        ],
        "timings": [
            {
                "gpu": gpu,
                "tp": tp,
                "micro_batch": micro_batch,
                "forward_s": numbers(timing.forward_s),
                "backward_s": numbers(timing.backward_s),
            }
            | ({} if timing.optimizer_s is None else {"optimizer_s": timing.optimizer_s})
            | ({"note": "; ".join(timing.notes)} if timing.notes else {})
            for (gpu, tp, micro_batch), timing in sorted(profile.timings.items())
        ],
    }
