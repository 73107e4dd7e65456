"""Reads and writes plan files (JSON)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from simulator.cluster.cluster import Cluster
from simulator.documents.fields import (
    InvalidValue,
    Table,
    open_table,
    quote,
    valid_integer,
    valid_text,
)
from simulator.documents.files import Document, load_document
from simulator.documents.problems import InputError, Problems
from simulator.models.layers import Recompute
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage, with_sizes

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
DEGREE_MAX = 2**20
"""Upper limit of degrees, sizes and layer numbers; more is a typing error."""


def load_plan(path: Path | str) -> Plan:
    """Read a plan file: a plan, or an object with the plan under the key ``plan``."""
    return plan_from_document(load_document(path, flaws_raise=False))


def read_plan(raw: object, place: str = "plan") -> Plan:
    """Read a plan from plain values; ``place`` names it in problems."""
    problems = Problems()
    if not isinstance(raw, dict):
        problems.add(place, f"is {quote(raw)}", 'give an object with "pipelines"')
        problems.raise_if_any()
    assert isinstance(raw, dict)
    return plan_from_document(Document(place, raw))


def plan_from_document(document: Document) -> Plan:
    """Read a plan and check its shape; ``check_plan`` checks it against a job and a cluster."""
    problems = Problems()
    top: Table | None = open_table(document, problems)
    assert top is not None
    if "plan" in top:
        for key in ("pipelines", "micro_batch_size"):
            if key in top:
                top.report(key, 'is given together with "plan"', "keep the plan in one place")
        top = top.table("plan")
    plan = _plan(top) if top is not None else None
    problems.raise_if_any()
    assert plan is not None, "a plan that cannot be built has a problem"
    return plan


def _plan(top: Table) -> Plan | None:
    size = top.integer("micro_batch_size", most=DEGREE_MAX, required=True)
    schedule: Schedule = top.choice("schedule", SCHEDULES, default="1f1b")
    virtual_stages = top.integer("virtual_stages", default=1, most=DEGREE_MAX)
    if virtual_stages > 1 and schedule != "interleaved":
        top.report(
            "virtual_stages",
            f'is {virtual_stages} with the schedule "{schedule}"',
            'give "schedule": "interleaved", or leave virtual_stages out',
        )
    if schedule == "interleaved" and virtual_stages < 2:
        top.report(
            "virtual_stages",
            f"is {virtual_stages}, but interleaving needs several chunks per device group",
            'give at least 2, or "schedule": "1f1b"',
        )
    together = top.integer("together", most=DEGREE_MAX) if "together" in top else None
    shares = top.flag("sequence_parallel", default=False)
    zero = top.value("zero", zero_stage)
    outer = top.integer("outer_every", most=DEGREE_MAX) if "outer_every" in top else None
    pipelines = [_pipeline(table) for table in top.tables("pipelines", required=True)]
    top.finish()
    whole = tuple(pipeline for pipeline in pipelines if pipeline is not None)
    if size is None or not whole or len(whole) != len(pipelines):
        return None
    plan = Plan(size, whole, schedule, virtual_stages, together, shares, zero, outer)
    return with_sizes(plan, plan.size_by_pipeline)


def zero_stage(value: Any) -> Literal[0, 1]:
    """Read a ZeRO stage."""
    stage = valid_integer(value, 0, 3)
    if stage > 1:
        raise InvalidValue(f"is {stage}", "give 0 or 1; ZeRO stages 2 and 3 are not supported")
    return 1 if stage else 0


def _pipeline(table: Table) -> Pipeline | None:
    micro_batches = table.integer("micro_batches", most=2**40, required=True)
    size = (
        table.integer("micro_batch_size", most=DEGREE_MAX) if "micro_batch_size" in table else None
    )
    stages = [_stage(inner) for inner in table.tables("stages", required=True)]
    table.finish()
    whole = tuple(stage for stage in stages if stage is not None)
    if micro_batches is None or len(whole) != len(stages):
        return None
    return Pipeline(micro_batches, whole, size)


def _stage(table: Table) -> Stage | None:
    layers = table.value("layers", _layer_range, required=True)
    tp = table.integer("tp", most=DEGREE_MAX, required=True)
    recompute: Recompute | int = table.value("recompute", _recompute, default="none")
    offload = table.integer("offload", default=0, most=DEGREE_MAX)
    split = table.integers("split") or (1,)
    places = _places(table, len(split))
    table.finish()
    if layers is None or tp is None:
        return None
    if isinstance(recompute, int) and recompute >= layers[1] - layers[0]:
        what = f"is {recompute}, but the stage has {layers[1] - layers[0]} layers"
        table.report("recompute", what, 'give a smaller number, or "full" for all layers')
    stage = Stage(layers, tp, places, recompute, split, offload)
    if stage.offloaded < offload:
        what = f"is {offload}, but {stage.offloaded} of the stage's layers are not recomputed"
        table.report("offload", what, "give a smaller number, or leave it out")
    return stage


def _recompute(value: Any) -> Recompute | int:
    for word in RECOMPUTES:
        if value == word:
            return word
    cure = 'give "none", "full", or how many of the first layers are recomputed'
    try:
        return valid_integer(value, 1, DEGREE_MAX)
    except InvalidValue as fault:
        raise InvalidValue(fault.what, cure) from None


def _layer_range(value: Any) -> tuple[int, int]:
    cure = "give [first, end] where end is the layer after the last"
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidValue(f"is {quote(value)}", cure)
    try:
        first, end = (valid_integer(bound, 0, DEGREE_MAX) for bound in value)
    except InvalidValue:
        raise InvalidValue(f"is {quote(value)}", cure) from None
    if end <= first:
        raise InvalidValue(f"is {quote(value)}, an empty range", cure)
    return first, end


def _places(table: Table, shares: int) -> tuple[Place, ...]:
    """Read the place of a stage, or of each share of a stage that is split."""
    if "places" not in table:
        place = _place(table)
        if shares > 1 and place.devices:
            table.report("devices", "cannot be the same for every share", 'give "places" instead')
        return (place,) * shares
    for key in ("gpu", "machine", "zone", "node", "devices"):
        if key in table:
            table.report(key, 'is given together with "places"', "give it inside each place")
    places = []
    for inner in table.tables("places"):
        places.append(_place(inner))
        inner.finish()
    if len(places) != shares and isinstance(table.values["places"], list):
        table.report(
            "places", f"has {len(places)} entries for {shares} shares", "give one per share"
        )
    return tuple(places)


def _place(table: Table) -> Place:
    gpu = table.text("gpu", required=True) or ""
    # The machine type may be left out where the zone has one pool of the GPU kind.
    machine = table.text("machine", default="")
    zone = table.text("zone", required=True) or ""
    node = table.value("node", valid_text)
    devices: tuple[int, ...] = ()
    if "devices" in table:
        devices = table.integers("devices", least=0) or ()
        if len(set(devices)) != len(devices):
            table.report("devices", f"is {quote(list(devices))}", "name each device once")
        if node is None:
            table.report("devices", 'is given without "node"', "name the node of these devices")
    return Place(gpu, machine, zone, node, devices)


def complete_plan(plan: Plan, cluster: Cluster) -> Plan:
    """Resolve aliases of GPU kinds, and fill in machine types that the plan leaves out.

    An ambiguous machine type stays empty; ``check_plan`` reports it.
    """
    known: dict[Place, Place] = {}
    for place in sorted({p for q in plan.pipelines for s in q.stages for p in s.places}, key=repr):
        known[place] = _complete_place(place, cluster)
    if all(before == after for before, after in known.items()):
        return plan
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, places=tuple(known[place] for place in stage.places))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _complete_place(place: Place, cluster: Cluster) -> Place:
    gpu, machine = place.gpu, place.machine
    # Unknown names stay as they are; ``check_plan`` reports them.
    with contextlib.suppress(InputError):
        gpu = cluster.catalogue.gpu_name(gpu)
    if machine and not any(pool.machine == machine for pool in cluster.pools):
        with contextlib.suppress(InputError):
            machine = cluster.catalogue.machine(machine).name
    if not machine:
        here = {
            pool.machine for pool in cluster.pools if (pool.gpu, pool.zone) == (gpu, place.zone)
        }
        machine = here.pop() if len(here) == 1 else ""
    return replace(place, gpu=gpu, machine=machine)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values in a fixed order, without optional defaults."""
    written: dict[str, Any] = {"micro_batch_size": plan.micro_batch_size}
    if plan.schedule != "1f1b":
        written["schedule"] = plan.schedule
    if plan.virtual_stages != 1:
        written["virtual_stages"] = plan.virtual_stages
    if plan.together is not None:
        written["together"] = plan.together
    if plan.sequence_parallel:
        written["sequence_parallel"] = True
    if plan.zero is not None:
        written["zero"] = plan.zero
    if plan.outer_every is not None:
        written["outer_every"] = plan.outer_every
    written["pipelines"] = [_pipeline_to_json(pipeline) for pipeline in plan.pipelines]
    return written


def _pipeline_to_json(pipeline: Pipeline) -> dict[str, Any]:
    written: dict[str, Any] = {"micro_batches": pipeline.micro_batches}
    if pipeline.micro_batch_size is not None:
        written["micro_batch_size"] = pipeline.micro_batch_size
    written["stages"] = [_stage_to_json(stage) for stage in pipeline.stages]
    return written


def _stage_to_json(stage: Stage) -> dict[str, Any]:
    written: dict[str, Any] = {"layers": list(stage.layers), "tp": stage.tp}
    if len(stage.places) == 1:
        written |= _place_to_json(stage.places[0])
    written["recompute"] = stage.recompute
    if stage.offload:
        written["offload"] = stage.offload
    if stage.split != (1,):
        written["split"] = list(stage.split)
    if len(stage.places) != 1:
        written["places"] = [_place_to_json(place) for place in stage.places]
    return written


def _place_to_json(place: Place) -> dict[str, Any]:
    written: dict[str, Any] = {"gpu": place.gpu}
    if place.machine:
        written["machine"] = place.machine
    written["zone"] = place.zone
    if place.node is not None:
        written["node"] = place.node
    if place.devices:
        written["devices"] = list(place.devices)
    return written


def plan_text(plan: Plan) -> str:
    """Return the text of a plan file, one stage per line; equal plans give equal texts."""
    raw = plan_to_json(plan)
    pipelines = raw.pop("pipelines")
    head = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in raw.items()]
    return "\n".join(["{", *head, '  "pipelines": [', _pipeline_lines(pipelines), "  ]", "}", ""])


def _pipeline_lines(pipelines: Sequence[dict[str, Any]]) -> str:
    blocks = []
    for pipeline in pipelines:
        stages = ",\n".join(
            f"        {json.dumps(stage, ensure_ascii=False)}" for stage in pipeline["stages"]
        )
        head = "".join(
            f"      {json.dumps(key)}: {value},\n"
            for key, value in pipeline.items()
            if key != "stages"
        )
        blocks.append(f'    {{\n{head}      "stages": [\n{stages}\n      ]\n    }}')
    return ",\n".join(blocks)
