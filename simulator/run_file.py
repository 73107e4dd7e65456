"""Measured runs in the project's own keys: a job, a cluster, a plan, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import cluster_from_document
from simulator.documents.fields import Table, open_table, quote
from simulator.documents.files import Document
from simulator.documents.problems import InputError, Problem, Problems, resembling
from simulator.hardware.catalogue import Catalogue
from simulator.inputs.job_file import job_from_document
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan, read_plan
from simulator.spec.job import Job
from simulator.spec.plan import Place, Plan, Stage

USUAL_ORDER = ("tp", "dp", "pp")
"""Innermost first: how plans without nodes are laid out (``machine_layout``)."""

MISSPELT = 0.75
"""A key that resembles a missing one by this ratio is taken for a misspelling of it."""
PARTS = ("job", "cluster", "plan")
OF_OTHER_RUNTIMES = {"gradient_allreduce_bytes", "softmax"}
FACTS = {*OF_OTHER_RUNTIMES, "rank_order"}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run to predict, and what was measured."""

    identifier: str
    source: str
    job: Job
    cluster: Cluster
    plan: Plan
    time_s: float | None
    memory_bytes: float | None
    notes: tuple[str, ...] = ()


def read_run(raw: object, where: str, folder: Path, catalogue: Catalogue) -> MeasuredRun:
    """Read one run, reporting its mistakes at their places."""
    if not isinstance(raw, dict):
        raise InputError(Problem(where, "is not an object", "see docs/formats.md"))
    problems = Problems()
    table = open_table(Document(where, raw), problems)
    name, source = table.text("id", default=where), table.text("source", default="")
    facts = _facts(table)
    notes: list[str] = []
    seconds, peak = _read_measured(table, notes)
    for key in PARTS:
        if not isinstance(raw[key] if key in table else None, dict):
            table.report(key, "is missing", f"give it the keys of a {key} file")
    table.keys_read["provenance"] = None  # Free text: where the numbers come from.
    notes += _note_unused(table)
    problems.raise_if_any()

    def document(key: str, values: Any) -> Document:
        return Document(f"{where}.{key}", values, folder=folder)

    settings, more = _apply_facts(raw["job"], facts)
    job = job_from_document(document("job", settings))
    cluster = cluster_from_document(document("cluster", raw["cluster"]), catalogue=catalogue)
    plan = complete_plan(read_plan(raw["plan"], f"{where}.plan"), cluster)
    order = facts.get("rank_order", USUAL_ORDER)
    stages = [stage for pipe in plan.pipelines for stage in pipe.stages]
    if any(place.node is not None for stage in stages for place in stage.places):
        order = USUAL_ORDER  # The plan names the machine of each stage.
    if order != USUAL_ORDER:
        Problems(list(check_plan(plan, job, cluster, place=f"{where}.plan"))).raise_if_any()
        plan = _lay_out(plan, order, cluster)
        if order[0] != "tp" and any(stage.tp > 1 for stage in stages):
            notes.append("rank_order: the ranks of a TP group count as neighbours on one machine")
    return MeasuredRun(name, source, job, cluster, plan, seconds, peak, (*notes, *more))


def _read_measured(table: Table, notes: list[str]) -> tuple[float | None, float | None]:
    measured = table.table("measured", required=True)
    if measured is None:
        return None, None
    seconds = measured.number("iteration_s", above=0)
    peak = measured.number("peak_memory_bytes", above=0)
    if seconds is None and peak is None:
        measured.finish()
    else:
        notes += _note_unused(measured, "measured: ")
    return seconds, peak


def _note_unused(table: Table, inside: str = "") -> list[str]:
    """Report unknown keys that look like misspellings of missing ones; return notes on others."""
    missing = [key for key in table.keys_read if key not in table.values]
    notes = []
    for key in sorted(set(table.values) - set(table.keys_read)):
        if close := resembling(key, missing, MISSPELT):
            cure = f'write "{close[0]}"'
            table.problems.add(table.place, f"has an unknown key {quote(key)}", cure)
        else:
            notes.append(f"{inside}{key} is not used")
    return notes


def _facts(table: Table) -> dict[str, Any]:
    """Read what is known of the run's runtime and machines besides the job."""
    given = table.values["facts"] if "facts" in table else None
    if given is not None and not isinstance(given, dict):
        table.report("facts", f"is {quote(given)}", "give a table")
        given = None
    facts = dict(given or {})
    if "rank_order" in facts:
        names = re.findall(r"[a-z]+", str(facts["rank_order"]).split("(")[0])
        if sorted(names) != sorted(USUAL_ORDER):
            cure = f"give an order of {', '.join(USUAL_ORDER)}, innermost first"
            table.report("facts", f"rank_order is {facts['rank_order']!r}", cure)
        facts["rank_order"] = tuple(names)
    return facts


def _apply_facts(job: Any, facts: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the job with the facts about its runtime, and notes on assumed and unused facts."""
    notes = [f"facts: {key} is not used" for key in sorted(set(facts) - FACTS)]
    training = job.get("training") or {}
    if not isinstance(training, dict):
        return job, notes  # ``job_from_document`` reports it.
    training = dict(training)
    if training.get("runtime", "sailor") == "sailor":
        known = sorted(OF_OTHER_RUNTIMES & set(facts))
        notes += [f"facts: {key} is not used: Sailor's own runtime decides it" for key in known]
        return job, notes
    sent = facts.get("gradient_allreduce_bytes")
    if sent is not None:
        training.setdefault("gradient_bytes", sent)
    softmax = facts.get("softmax")
    is_half = training.get("precision") != "fp32"
    if softmax is None and sent == 4 and is_half:
        # DeepSpeed reduced 16-bit gradients in fp32 for Megatron-LM 1.1.5, whose fused softmax had
        # to be switched on.
        softmax = "fp32"
        notes.append("softmax: not stated; taken for Megatron-LM 1.1.5's, in fp32 and not fused")
    if softmax is not None:
        training.setdefault("softmax", softmax)
    return {**job, "training": training}, notes


def _lay_out(plan: Plan, order: tuple[str, ...], cluster: Cluster) -> Plan:
    """Name the machines of a plan whose ranks are numbered in this order, innermost first."""
    if any(len(stage.places) > 1 for pipe in plan.pipelines for stage in pipe.stages):
        what = "orders ranks otherwise than tp, dp, pp, but a stage of the plan is split"
        raise InputError(Problem("facts.rank_order", what, "name the nodes in the plan instead"))
    # Machines that lost GPUs count with the size of whole ones.
    pools = sorted(cluster.pools, key=lambda pool: pool.gpus_per_machine)
    sizes = {pool.key: pool.gpus_per_machine for pool in pools}
    taken: dict[tuple[str, str, str], int] = {}
    nodes: dict[tuple[int, int], str] = {}
    for p, s in _positions(plan, order):
        stage = plan.pipelines[p].stages[s]
        key, size = stage.place.key, sizes[stage.place.key]
        first = taken.get(key, 0)
        if first % size + stage.tp > size:
            first += size - first % size
        nodes[p, s] = f"{key[1]} {first // size}"
        taken[key] = first + stage.tp

    def placed(p: int, s: int, stage: Stage) -> Stage:
        # A device group has several chunks where the schedule is interleaved.
        node = nodes[p, s % plan.group_count(plan.pipelines[p])]
        return replace(stage, places=(Place(*stage.place.key, node=node),))

    return replace(
        plan,
        pipelines=tuple(
            replace(pipe, stages=tuple(placed(p, s, one) for s, one in enumerate(pipe.stages)))
            for p, pipe in enumerate(plan.pipelines)
        ),
    )


def _positions(plan: Plan, order: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield (pipeline, device group) in the order of their ranks."""
    every = [(p, s) for p, pipe in enumerate(plan.pipelines) for s in range(plan.group_count(pipe))]
    dp_first = order.index("dp") < order.index("pp")
    yield from sorted(every, key=lambda at: at[::-1] if dp_first else at)
