"""Reads and writes profile files; the published format is recognised by its content."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

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
from simulator.layer_costs.profile import (
    Collectives,
    LayerSizes,
    Profile,
    Timing,
    TimingMeasurement,
)
from simulator.layer_costs.published_profile import profile_from_json
from simulator.models.layers import PRECISIONS, Precision

FORM = "sailor_profile"
VERSION = 1
COLLECTIVES: tuple[Collectives, ...] = get_args(Collectives)


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
    fingerprint = top.text("fingerprint", default="")
    head_makes_logits = top.flag("head_makes_logits", default=True)
    names = top.value("layers", _names, required=True)
    count = len(names) if names is not None else None
    sizes, parameters = _sizes(top, count)
    timings = _timings(top, count, catalogue)
    did_not_fit = _did_not_fit(top, catalogue)
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
        fingerprint=fingerprint,
        did_not_fit=did_not_fit,
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
    timings: dict[tuple[str, int, int], Timing] = {}
    for table in top.tables("timings", required=True):
        gpu, tp, micro_batch = _key(table, catalogue)
        forward = _row(table, "forward_s", count, above=0.0)
        backward = _row(table, "backward_s", count, least=0.0)
        step = table.number("optimizer_s", above=0)
        note = table.text("note", default="")
        kept = _row(table, "kept_bytes", count, least=0.0, required=False)
        transient = _row(table, "transient_bytes", count, least=0.0, required=False)
        collectives: Collectives = table.choice("collectives", COLLECTIVES, default="inside")
        measurement = _measurement(table, count)
        table.finish()
        if gpu is None or tp is None or micro_batch is None:
            continue
        if forward is None or backward is None:
            continue
        if (gpu, tp, micro_batch) in timings:
            table.report("micro_batch", "is given twice for this GPU and TP", "keep one of the two")
        timings[gpu, tp, micro_batch] = Timing(
            np.array(forward),
            np.array(backward),
            step,
            (note,) if note else (),
            kept_bytes=None if kept is None else np.array(kept),
            transient_bytes=None if transient is None else np.array(transient),
            collectives=collectives,
            measurement=measurement,
        )
    return timings


def _key(table: Table, catalogue: Catalogue) -> tuple[str | None, int | None, int | None]:
    """Read the GPU kind, the TP degree and the micro batch of a measurement."""

    def kind(value: Any) -> str:
        try:
            return catalogue.gpu_name(valid_text(value))
        except InputError as error:
            raise InvalidValue(error.problems[0].what, error.problems[0].cure) from None

    return (
        table.value("gpu", kind, required=True),
        table.integer("tp", least=1, required=True),
        table.integer("micro_batch", least=1, required=True),
    )


def _measurement(timing: Table, count: int | None) -> TimingMeasurement | None:
    table = timing.table("measured")
    if table is None:
        return None
    spreads = [
        _row(table, key, count, least=0.0, required=False)
        for key in ("forward_spread", "backward_spread")
    ]
    found = TimingMeasurement(
        device=table.text("device", default=""),
        driver=table.text("driver", default=""),
        torch=table.text("torch", default=""),
        date=table.text("date", default=""),
        samples=table.integer("samples", default=1),
        spread=table.number("spread", default=0.0, least=0),
        forward_spread=tuple(spreads[0] or ()),
        backward_spread=tuple(spreads[1] or ()),
    )
    table.finish()
    return found


def _did_not_fit(top: Table, catalogue: Catalogue) -> frozenset[tuple[str, int, int]]:
    found = set()
    for table in top.tables("did_not_fit"):
        gpu, tp, micro_batch = _key(table, catalogue)
        table.finish()
        if gpu is not None and tp is not None and micro_batch is not None:
            found.add((gpu, tp, micro_batch))
    return frozenset(found)


def _row(
    table: Table,
    key: str,
    count: int | None,
    *,
    least: float | None = None,
    above: float | None = None,
    required: bool = True,
) -> list[float] | None:
    def accept(value: Any) -> list[float]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise InvalidValue(
                f"is {quote(value)}", f"give one number for each of the {count} layers"
            )
        return [valid_number(item, least, above, None, None) for item in value]

    return table.value(key, accept, required=required)


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Return the profile in Sailor's format."""

    too_large = [
        {"gpu": gpu, "tp": tp, "micro_batch": micro_batch}
        for gpu, tp, micro_batch in sorted(profile.did_not_fit)
    ]
    found = {
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
            {"gpu": gpu, "tp": tp, "micro_batch": micro_batch, **_timing_to_json(timing)}
            for (gpu, tp, micro_batch), timing in sorted(profile.timings.items())
        ],
    }
    more = {"fingerprint": profile.fingerprint, "did_not_fit": too_large}
    return found | {key: value for key, value in more.items() if value}


def _timing_to_json(timing: Timing) -> dict[str, Any]:
    rows: dict[str, Floats | None] = {
        "forward_s": timing.forward_s,
        "backward_s": timing.backward_s,
        "kept_bytes": timing.kept_bytes,
        "transient_bytes": timing.transient_bytes,
    }
    found: dict[str, Any] = {
        key: [float(value) for value in row] for key, row in rows.items() if row is not None
    }
    if timing.optimizer_s is not None:
        found["optimizer_s"] = timing.optimizer_s
    if timing.notes:
        found["note"] = "; ".join(timing.notes)
    if timing.collectives != "inside":
        found["collectives"] = timing.collectives
    if timing.measurement is not None:
        how = asdict(timing.measurement)
        found["measured"] = {key: value for key, value in how.items() if value not in ("", ())}
    return found
