"""The document behind the page in the browser: sent whole once, then as patches.

Times are absolute, so that the document does not change merely because time passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.protocol.codec import plain
from agents.protocol.records import NodeId, Point
from sailord.api.answers import render
from sailord.api.answers.goodput_types import GoodputView, ShareView
from sailord.api.answers.problems import Service, problems_of
from sailord.api.answers.running_job import RunningJob
from sailord.api.answers.types import ActiveView, NodeView
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import Node
from sailord.core.model.state import Active, State
from sailord.core.queries.drain_status import drained
from sailord.core.queries.straggler_queries import straggler_texts


@dataclass(frozen=True, slots=True)
class LiveContext:
    """What the document shows besides the controller's state."""

    plan: Mapping[str, Any] | None
    about: Mapping[str, Any]
    step_rate: StepRate
    at_of: Mapping[str, float]
    """When a message was stored, by its id; tells when a checkpoint became durable."""
    safe: Point | None
    """The newest point that survives the loss of any one node."""
    goodput: GoodputView
    service: Service
    leader: str
    schedule: Mapping[str, Any] | None = None
    """The plan's predicted schedule, if a page asked for it."""
    running: tuple[RunningJob, ...] = ()
    """The jobs that run beside each other, where several share the cluster."""
    risks: tuple[str, ...] = ()
    """Why the job's budget or deadline is at risk."""


@dataclass(eq=False)
class NodeRows:
    """Short rows for the nodes; rebuilds only those of nodes that changed."""

    kinds: list[tuple[str, str, str, int, bool]] = field(default_factory=list)
    """The distinct (zone, machine type, GPU, GPUs, spot); a row names its own by index."""
    _numbers: dict[tuple[str, str, str, int, bool], int] = field(default_factory=dict)
    _rows: dict[NodeId, tuple[Node, str, bool, NodeView, dict[str, Any]]] = field(
        default_factory=dict
    )

    def of(self, state: State) -> dict[NodeId, dict[str, Any]]:
        """Return a row for each node by its id; empty fields are left out."""
        free, slow = drained(state), straggler_texts(state)
        known, self._rows = self._rows, {}
        for id_, node in state.nodes.items():
            said, is_safe = slow.get(id_, ""), id_ in free
            row = known.get(id_)
            if row is None or row[0] is not node or row[1:3] != (said, is_safe):
                view = render.node_view(node, safe_to_stop=is_safe, slow=said)
                row = node, said, is_safe, view, self._row(view)
            self._rows[id_] = row
        return {id_: row[4] for id_, row in self._rows.items()}

    @property
    def views(self) -> list[NodeView]:
        """The nodes of the last rows."""
        return [row[3] for row in self._rows.values()]

    def _row(self, view: NodeView) -> dict[str, Any]:
        kind = (view.zone, view.machine, view.gpu, view.gpus, view.spot)
        if kind not in self._numbers:
            self._numbers[kind] = len(self.kinds)
            self.kinds = [*self.kinds, kind]
        row = {
            "name": view.name,
            "kind": self._numbers[kind],
            "state": view.state,
            "taking": view.taking,
            "leaves_at": view.leaves_at,
            "cordoned": view.cordoned,
            "safe": view.safe_to_stop and view.state == "draining",
            "slow": bool(view.slow),
            "why": view.why_lost or view.failure or view.unsound or view.slow or view.trouble,
        }
        return {key: value for key, value in row.items() if value or key == "kind"}


@dataclass(eq=False)
class BusyTimes:
    """Compute seconds of the ranks in the predicted schedule: as measured, and as predicted.

    Measurements change a little with each step, so they are read every ``BUSY_S`` only.
    """

    _found: dict[str, list[float | None]] = field(default_factory=dict)
    _of: object = None
    """The generation and the ranks that they were read for, ..."""
    _at: float = 0.0
    """... and when."""

    def of(self, state: State, schedule: Mapping[str, Any] | None) -> dict[str, list[float | None]]:
        """Return both by rank."""
        generation = None if state.active is None else state.active.generation
        if generation is None or schedule is None:
            return {}
        ranks = {group["rank"] for each in schedule["pipelines"] for group in each["groups"]}
        of = generation.job, generation.number, ranks
        if of != self._of or not self._at <= state.now < self._at + BUSY_S:
            predicted = () if generation.busy is None else generation.busy.seconds
            self._of, self._at = of, state.now
            self._found = {
                str(rank): [_digits(seconds, 2), _digits(predicted[rank], 2)]
                if rank < len(predicted)
                else [_digits(seconds, 2), None]
                for _, report in state.reports_of(generation)
                for rank, seconds in report.busy
                if rank in ranks
            }
        return self._found


BUSY_S = 5.0


@dataclass(eq=False)
class DocumentCaches:
    """Caches that carry over from one document to the next."""

    rows: NodeRows = field(default_factory=NodeRows)
    busy: BusyTimes = field(default_factory=BusyTimes)


def live_document(state: State, kept: DocumentCaches, about: LiveContext) -> dict[str, Any]:
    """Return the document."""
    rows = kept.rows
    nodes = rows.of(state)
    active = state.active
    job = render.active_view(
        state, about.step_rate, None, about.about, about.at_of, state.now, about.safe
    )
    document = {
        "leads": state.term is not None,
        "leader": about.leader,
        "store": plain(about.service.store),
        "job": None if job is None else _job(state, active, job),
        "beside": [_beside(each) for each in about.running if job is None or each.id != job.id]
        or None,
        "plan": _plan(active, about),
        "nodes": nodes,
        "busy": kept.busy.of(state, about.schedule),
        "kinds": [list(kind) for kind in rows.kinds],
        "counts": render.counts_view(state),
        "queue": [job.id for job in render.jobs_view(state).jobs if job.state == "queued"],
        "paused": [job.id for job in render.paused_view(state)],
        "goodput": _goodput(about.goodput),
        "capacity": None if about.service.capacity is None else plain(about.service.capacity),
        "problems": list(
            problems_of(
                *(about.service, job, rows.views, state.now, render.paused_view(state)),
                *(about.risks, render.stuck_view(state)),
            )
        ),
    }
    return {key: value for key, value in document.items() if value is not None}


def _job(state: State, active: Active | None, view: ActiveView) -> dict[str, Any]:
    assert active is not None
    generation, bill = view.generation, state.job.bill
    age = view.durable_age_s
    return {
        "id": view.id,
        "state": view.state,
        "reason": state.job.reason,
        "steps": view.steps,
        "step": view.step,
        "step_at": _digits(active.progress.advanced_at, 12),
        "phase": plain(view.phase),
        "question": None if active.question is None else active.question.reason,
        "generation": None
        if generation is None
        else {
            "number": generation.number,
            "reason": generation.reason,
            "persist_every": generation.persist_every,
            "members": len(generation.members),
            "from_step": generation.restore.point.step,
        },
        "predicted": {k: _digits(v) for k, v in plain(view.predicted).items()},
        "measured": {k: _digits(v) for k, v in plain(view.measured).items()},
        "unit": view.unit,
        "durable_step": view.durable_step,
        "durable_at": None if age is None else round(state.now - age),
        "uri": state.job.saving.uri,
        "safe_step": view.safe_step,
        "troubles": list(view.troubles),
        "failures": view.failures,
        "drift": list(view.drift),
        "spent": {
            "usd": round(bill.usd, 4),
            "until": bill.until,
            "usd_per_hour": view.spent.usd_per_hour,
            "usd_max": bill.usd_max,
            "unpriced_s": round(bill.unpriced_s),
        },
    }


def _beside(job: RunningJob) -> dict[str, Any]:
    row = {"id": job.id, "phase": job.phase, "step": job.step, "steps": job.steps}
    row |= {"nodes": len(job.nodes), "step_s": _digits(job.step_s, 2)}
    return {key: value for key, value in row.items() if value is not None}


def _plan(active: Active | None, about: LiveContext) -> dict[str, Any] | None:
    """Which ranks compute which layers, and how each stage is predicted to spend an iteration."""
    if active is None or active.generation is None or about.plan is None:
        return None
    stages = (about.about.get("estimate") or {}).get("stages") or []
    return {
        "sha": active.generation.plan,
        "why": about.about.get("why", []),
        "per_iteration": about.about.get("tokens_per_iteration"),
        "members": list(active.generation.members),
        "micro_batch": about.plan.get("micro_batch_size"),
        "pipelines": [
            {
                "micro_batches": pipeline.get("micro_batches"),
                **{key: pipeline[key] for key in ("micro_batch_size",) if key in pipeline},
                "stages": [
                    {key: stage[key] for key in SHOWN if key in stage}
                    for stage in pipeline["stages"]
                ],
                "times": [
                    {key: _digits(value) for key, value in each.items()} for each in stages[number]
                ]
                if number < len(stages)
                else [],
            }
            for number, pipeline in enumerate(about.plan["pipelines"])
        ],
    }


SHOWN = ("layers", "tp", "gpu", "machine", "zone", "node", "devices", "split", "places")


def _goodput(view: GoodputView) -> dict[str, Any]:
    """The ledger by cause, as GPU seconds and dollars."""
    return {
        "since": view.since,
        "gpus": view.gpus,
        "usd": round(view.usd, 4),
        "usd_per_hour": _digits(view.usd_per_hour, 6),
        "goodput": _digits(view.goodput),
        "unpriced_gpu_s": round(view.unpriced_gpu_s),
        "causes": {
            each.cause: [round(each.gpu_s, 1), round(each.usd, 4), each.text, each.label]
            for each in view.causes
        },
        "days": list(map(_share, view.days)),
        "jobs": list(map(_share, view.jobs)),
    }


def _share(view: ShareView) -> list[Any]:
    """A day or a job: its name, goodput, GPU seconds and dollars; without a name: the rest."""
    name = None if view.since is None else view.name
    return [name, _digits(view.goodput), round(view.gpu_s), round(view.usd, 2)]


def _digits(value: Any, digits: int = 4) -> Any:
    """Round a number to the digits that a person reads; leave other values unchanged."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
