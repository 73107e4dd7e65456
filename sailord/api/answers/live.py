"""The document behind the page in the browser: sent whole once, then as patches.

Times are absolute, so that the document does not change merely because time passes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.protocol.codec import plain
from agents.protocol.records import ENDED, JobId, NodeId, Point
from sailord.api.answers import render
from sailord.api.answers.goodput_types import GoodputView, ShareView
from sailord.api.answers.node_types import NodeView
from sailord.api.answers.problems import FirstSeen, Service, problems_of
from sailord.api.answers.types import ActiveView
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held, Waiting
from sailord.core.model.state import Active, State
from sailord.core.queries.drain_status import drained
from sailord.core.queries.job_cost import why_not_afforded
from sailord.core.queries.job_queue import in_queue
from sailord.core.queries.straggler_queries import NOT_SLOW, SlowText, straggler_texts
from sailord.notify.feed import EventKind
from sailord.text.next_text import needed_text, timed_next_texts

LISTED_MAX = 20
"""Most jobs of the queue that are listed, and of those that wait for an operator."""
ENDED_MAX = 5
"""Most ended jobs that are listed."""


@dataclass(frozen=True, slots=True)
class LiveContext:
    """What the document shows besides the controller's state."""

    goodput: GoodputView
    service: Service
    leader: str
    at_of: Mapping[str, float]
    """When a message was stored, by its id; tells when a checkpoint became durable."""
    parts: tuple[State, ...] = ()
    """Those of jobs that share the cluster, the first one first; none: one has it alone."""
    first_seen: FirstSeen = field(default_factory=FirstSeen)


@dataclass(frozen=True, slots=True)
class JobContext:
    """What the document shows of one job besides the controller's state."""

    plan: Mapping[str, Any] | None
    about: Mapping[str, Any]
    step_rate: StepRate
    safe: Point | None
    """The newest point that survives the loss of any one node."""
    schedule: Mapping[str, Any] | None = None
    """The plan's predicted schedule, if a page asked for it."""
    risks: Mapping[EventKind, str] = field(default_factory=dict)
    """Why the job's budget or deadline is at risk, by the kind of event."""
    needed: tuple[str, ...] = ()
    """Its nodes without any one of which there is no plan."""
    chosen: JobId | None = None
    """The job that a reader chose; ``None``: the first one that runs."""


@dataclass(eq=False)
class NodeRows:
    """Short rows for the nodes; rebuilds only those of nodes that changed."""

    kinds: list[tuple[str, str, str, int, bool]] = field(default_factory=list)
    """The distinct (zone, machine type, GPU, GPUs, spot); a row names its own by index."""
    _numbers: dict[tuple[str, str, str, int, bool], int] = field(default_factory=dict)
    _rows: dict[NodeId, tuple[Node, tuple[SlowText, bool, str], NodeView, dict[str, Any]]] = field(
        default_factory=dict
    )

    def of(self, state: State, parts: Sequence[State] = ()) -> dict[NodeId, dict[str, Any]]:
        """Return a row for each node by its id; empty fields are left out."""
        known, self._rows = self._rows, {}
        for part in parts or (state,):
            free, slow = drained(part), straggler_texts(part)
            is_first = state.active is part.active or part.active is None
            owner = "" if is_first else part.job.id
            for id_, node in part.nodes.items():
                said = slow.get(id_, NOT_SLOW), id_ in free, owner
                row = known.get(id_)
                if row is None or row[0] is not node or row[1] != said:
                    view = render.node_view(node, safe_to_stop=said[1], slow=said[0])
                    row = node, said, view, self._row(view, owner)
                self._rows[id_] = row
        return {id_: row[3] for id_, row in self._rows.items()}

    @property
    def views(self) -> list[NodeView]:
        """The nodes of the last rows."""
        return [row[2] for row in self._rows.values()]

    def _row(self, view: NodeView, owner: str) -> dict[str, Any]:
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
            "job": owner,
        }
        return {key: value for key, value in row.items() if value or key == "kind"}


@dataclass(eq=False)
class BusyTimes:
    """Compute seconds of the ranks in the predicted schedule: as measured, and as predicted.

    Measurements change a little with each step, so they are read every ``BUSY_S`` only.
    """

    _found: dict[str, list[float | None]] = field(default_factory=dict)
    _of: object = None
    """The generation and the ranks that they were read for."""
    _at: float = 0.0
    """When they were read."""

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
    busy: dict[JobId, BusyTimes] = field(default_factory=dict)
    """Of each job that was shown."""


def live_document(
    state: State, kept: DocumentCaches, about: LiveContext, of_job: JobContext
) -> dict[str, Any]:
    """Return the document."""
    return {**cluster_part(state, kept, about), **job_part(state, kept, about, of_job)}


def cluster_part(state: State, kept: DocumentCaches, about: LiveContext) -> dict[str, Any]:
    """Return what is the same whichever job is shown; made before ``job_part``."""
    service, first = about.service, state.active
    document = {
        "leads": state.term is not None,
        "leader": about.leader,
        "led_since": state.led_since,
        "store": plain(service.store),
        "first": None if first is None else first.job,
        "nodes": kept.rows.of(state, about.parts),
        "kinds": [list(kind) for kind in kept.rows.kinds],
        "counts": render.counts_view(state),
        "queued": len(in_queue(state)),
        "goodput": _goodput(about.goodput),
        "capacity": None if service.capacity is None else plain(service.capacity),
    }
    return {key: value for key, value in document.items() if value is not None}


def job_part(
    state: State, kept: DocumentCaches, about: LiveContext, of_job: JobContext
) -> dict[str, Any]:
    """Return what is about the chosen job, or else the first one that runs."""
    parts, chosen = about.parts or (state,), of_job.chosen
    active_of = {part.active.job: part for part in parts if part.active is not None}
    part = state if chosen is None else active_of.get(chosen, state)
    active = part.active
    view = render.active_view(
        part, of_job.step_rate, None, of_job.about, about.at_of, part.now, of_job.safe
    )
    job: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    busy: dict[str, list[float | None]] = {}
    if active is not None and view is not None and chosen in (None, active.job):
        job, plan = _job(part, active, view, of_job.needed), _plan(active, of_job)
        kept.busy = {id_: each for id_, each in kept.busy.items() if id_ in active_of}
        busy = kept.busy.setdefault(active.job, BusyTimes()).of(part, of_job.schedule)
    elif chosen is not None:
        job = _resting_row(state, chosen)
    shown = chosen or (None if active is None else active.job)
    paused = [each for each in render.paused_view(state) if view is None or each.id != view.id]
    rows = {id_: _row_of(each, shown) for id_, each in active_of.items()}
    rows |= {id_: {"state": state.jobs[id_].state} for id_ in _resting_jobs(state, shown, rows)}
    problems = problems_of(
        *(about.service, view, kept.rows.views, part.now, paused),
        *(of_job.risks, render.stuck_view(*parts)),
    )
    led_since = state.led_since
    document = {
        "job": job,
        "plan": plan,
        "busy": busy,
        "jobs": rows,
        "order": list(rows),
        "problems": [each.text for each in problems],
        "problems_since": [about.first_seen.since(each, led_since, part.now) for each in problems],
    }
    return {key: value for key, value in document.items() if value is not None}


def _row_of(part: State, shown: JobId | None) -> dict[str, Any]:
    """A job that runs, in the list of jobs; of the one that is shown ``job`` tells the rest."""
    active = part.active
    assert active is not None
    row: dict[str, Any] = {"state": render.phase_view(part, active).name}
    if active.job == shown:
        return row
    progress, members = active.progress, active.generation.members if active.generation else ()
    row |= {"step": progress.step, "steps": part.job.steps, "nodes": len(members)}
    if not isinstance(active.phase, Held | Waiting):
        row |= {"step_s": _digits(progress.step_s, 2)}
    return {key: value for key, value in row.items() if value is not None}


def _resting_jobs(state: State, shown: JobId | None, running: Container[JobId]) -> list[JobId]:
    """The jobs that do not run, as they are listed: the next in the queue, those that wait for an
    operator, the last ones that ended, and the one that is shown."""
    rest = [job for job in state.jobs.values() if job.id not in running]
    queue = [job.id for job in in_queue(state)][:LISTED_MAX]
    rest.sort(key=lambda job: (-job.submitted_at, job.id))
    stopped = [job.id for job in rest if job.state in ("paused", "held")][:LISTED_MAX]
    ended = [job.id for job in rest if job.state in ENDED][:ENDED_MAX]
    found = [*queue, *stopped, *ended]
    is_missing = shown in state.jobs and shown not in running and shown not in found
    return [*found, shown] if is_missing and shown is not None else found


def _resting_row(state: State, id_: JobId) -> dict[str, Any] | None:
    """A job that does not run."""
    view = render.job_view(state, id_)
    if view is None:
        return None
    durable, bill = view.durable, view.bill
    queue = [job.id for job in in_queue(state)]
    return {
        "id": view.id,
        "state": view.state,
        "reason": view.reason,
        "place": queue.index(id_) + 1 if id_ in queue else None,
        "steps": view.steps,
        "step": view.step,
        "durable_step": None if durable is None else durable.point.step,
        "uri": view.saving.uri,
        "spent": {
            "usd": round(bill.usd, 4),
            "usd_per_hour": 0.0,
            "usd_max": bill.usd_max,
            "unpriced_s": round(bill.unpriced_s),
            "unpaid": bool(why_not_afforded(state, id_)),
        },
    }


def _job(state: State, active: Active, view: ActiveView, needed: Sequence[str]) -> dict[str, Any]:
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
        "next": [
            [each.before, None if each.at is None else round(each.at), each.after]
            for each in timed_next_texts(plain(view.next), is_waiting=view.phase.name == "waiting")
        ],
        "needed": needed_text(needed) if needed else None,
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
            "unpaid": bool(view.spent.unpaid),
        },
    }


def _plan(active: Active, about: JobContext) -> dict[str, Any] | None:
    """Which ranks compute which layers, and how each stage is predicted to spend an iteration."""
    if active.generation is None or about.plan is None:
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
