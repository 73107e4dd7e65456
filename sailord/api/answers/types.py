"""Types of the API's answers; the OpenAPI document is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agents.protocol.records import Durable, GenerationRecord, JobRecord
from sailord.api.answers.running_job import RunningJob
from sailord.cluster_records import Transition
from sailord.core.queries.what_next import NOTHING_NEXT, WhatNext
from sailord.notify.feed import FeedEvent
from sailord.page.training_curve import CurvePoint
from simulator.documents.problems import Problem

PhaseName = Literal[
    "waiting", "planning", "opening", "starting", "running", "stopping", "closing", "held"
]


@dataclass(frozen=True, slots=True)
class RequestProblems:
    """Why a request was refused."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Live:
    """The event loop runs."""

    live: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A leader is elected; ``leads``: it is this sailord."""

    ready: bool
    leads: bool


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """An agent as Prometheus' `http_sd_configs` wants it."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PhaseView:
    """A job's phase, its begin and its deadline."""

    name: PhaseName
    since: float | None
    deadline: float | None
    reason: str
    has_no_node: bool = False
    """It waits since no node is ready; the reason says why."""
    has_no_plan: bool = False
    """It waits since there is no plan for the nodes that are up."""
    trains: bool = False
    """It is planning and trains meanwhile; without an answer in time its plan stays for now."""


@dataclass(frozen=True, slots=True)
class JobView(JobRecord):
    """A job's record and its progress."""

    generation: GenerationRecord | None = None
    phase: PhaseView | None = None
    """Of the active job only."""
    step: int | None = None
    durable: Durable | None = None


@dataclass(frozen=True, slots=True)
class ListedJob(JobRecord):
    """A job's record; of the active job with its phase, and the reason for that."""

    phase: PhaseName | None = None
    step: int | None = None
    """The step that it reached or would go on from; null: it has ended."""
    ends_at: float | None = None
    """When it will be done at its present speed; null: not known, or its budget ends before."""


@dataclass(frozen=True, slots=True)
class Submitted(JobRecord):
    """A submitted job's record, with warnings."""

    warnings: tuple[str, ...] = ()
    """Files that the head lacks, models that fit on no known node, limits that cannot be kept."""
    snapshot_bytes: int = 0
    """The memory that snapshots usually need on all nodes of one zone together."""
    waits_for: tuple[str, ...] = ()
    """The jobs before it: the one that has the cluster, then the queue."""
    blocked: str = ""
    """Why the job that has the cluster keeps it without training, and what ends that."""
    place: str = ""
    """For whom it waits, and for about how long."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """All jobs: the active one first, then the queue and those that ended."""

    jobs: tuple[ListedJob, ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """The planner's estimate; null where a price or the plan is missing."""

    iteration_s: float | None
    tokens_per_s: float | None
    usd_per_hour: float | None
    source: str | None = None
    """Its weakest source: ``measured``, ``interpolated``, or computed otherwise."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the last steps; null before there are enough."""

    iteration_s: float | None
    tokens_per_s: float | None
    loss: float | None
    stall_s: float | None
    """How long the last snapshot stalled a step."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of the job."""

    usd: float
    """So far, without the time at unknown prices."""
    unpriced_s: float
    usd_per_hour: float | None
    """Now; null if a price is unknown, zero if nothing runs."""
    usd_max: float | None
    """Its budget, if it has one."""
    unpaid: str = ""
    """Why its budget does not pay for going on: it cannot be resumed."""
    usd_needed: float | None = None
    """About what it will have cost at its end, at its last speed and price; null: not known."""


@dataclass(frozen=True, slots=True)
class ActiveView:
    """The job that the cluster works on."""

    id: str
    state: str
    priority: int
    steps: int | None
    step: int
    step_age_s: float
    phase: PhaseView
    generation: GenerationRecord | None
    members: tuple[str, ...]
    """By name."""
    plan: Mapping[str, Any] | None
    predicted: Predicted
    measured: Measured
    unit: str
    """What ``tokens_per_s`` counts: tokens, or samples if the job's samples have no tokens."""
    durable_step: int | None
    durable_age_s: float | None
    steps_at_risk: int
    """Steps since the last durable one."""
    storage_trouble: str
    """Why the last upload to the storage failed, or that a checkpoint takes long to be read."""
    troubles: tuple[str, ...]
    """Recent problems of its nodes with uploading and replicating snapshots."""
    failures: int
    spent: Spent
    drift: tuple[str, ...]
    """GPU kinds that compute slower or faster than their profile says, beyond its error bar."""
    safe_step: int | None = None
    """The newest step that survives the loss of any one node; null: none, or not known yet."""
    checkpoint_uri: str | None = None
    """Where its checkpoints go; null: it names no place, so it has no durable ones."""
    last_move: Told | None = None
    """Its last reconfiguration, in one line; null: none, or too long ago to be known."""
    last_order: Told | None = None
    """The last order about it or a node, and who gave it; null as above."""
    begun_at: float | None = None
    """When it was given the cluster."""
    next: WhatNext = NOTHING_NEXT
    """Its next checkpoint and question to the planner, if nothing happens before."""
    earlier: CurvePoint | None = None
    """The last sample of its curve with a throughput that is ten minutes old or older."""
    slow: Told | None = None
    """Since when it is slower than before though no node is to blame, and how much; null: not."""
    unanswered: int = 0
    """Questions in a row that the planner did not answer."""
    needed: tuple[str, ...] = ()
    """Its nodes without any one of which there is no plan, as far as that was computed."""


@dataclass(frozen=True, slots=True)
class Told:
    """What happened, and when."""

    at: float
    text: str
    result: str = ""
    """Of an order: what came of it; empty: nothing yet, or that is not known."""
    result_at: float | None = None


@dataclass(frozen=True, slots=True)
class PausedJob:
    """A job that waits for an operator and has no nodes."""

    id: str
    state: str
    reason: str
    unpaid: str = ""
    """Why its budget does not pay for going on: it cannot be resumed."""
    step: int | None = None
    """The step from which it would go on."""
    steps: int | None = None
    """After how many it is done."""
    held_at: float | None = None
    """When it was last held."""


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The present leader."""

    host: str
    address: str
    since: float | None = None
    """When it was elected; null: this sailord does not lead."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """Whether the store is available."""

    answers: bool
    away_since: float | None
    trouble: str = ""
    """The last error while it is unavailable, or why it refuses a write."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A draining node."""

    name: str
    leaves_at: float | None
    safe_to_stop: bool
    """No job needs its data any more."""
    stuck: str = ""
    """Why its drain cannot end, and what ends it."""
    left_at: float | None = None
    """When the job begins to leave it, in seconds since 1970; null: it does not use it, or leaves
    it now."""


@dataclass(frozen=True, slots=True)
class CapacityGlance:
    """Numbers of rented instances; /v1/capacity has the details."""

    wanted: int
    up: int
    awaited: int
    """Created; their agents have not registered yet."""
    asked: int
    """Requested; the provider has not answered yet."""
    resting: int
    """Pools in cooldown after a refusal."""
    stopped: tuple[str, ...]
    """Pools that are stopped since no instance brings up an agent, and why."""
    usd_per_hour: float
    spent_usd: float
    stop: str
    """Of a total budget: empty, ``parting`` (unused instances go) or ``ended`` (all go)."""
    orphans: tuple[str, ...]
    """Instances that could not be deleted and are still billed."""
    deadline: str = ""
    """What is rented for the active job's deadline, and why."""
    is_late: bool = False
    """On-demand instances cannot keep it either."""
    why_not_rented: str = ""
    """Why no instance is wanted, if there is no plan for the active job."""
    rests_until: float | None = None
    """When the first cooldown ends; null: there is none."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests and connections refused: no valid token or certificate, or over a limit."""

    last_hour: int
    """Counted up to 1,000."""
    total: Mapping[str, int]
    """Since this sailord started, by cause, as in ``sailor_requests_refused_total``."""
    at: float | None = None
    """When the last one was refused; null: none was."""
    address: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """An overview of cluster, job and store."""

    cluster: str
    at: float
    leads: bool
    term: int | None
    leader: LeaderView | None
    store: StoreView
    job: ActiveView | None
    queued: int
    nodes: Mapping[str, int]
    """Number of nodes by state."""
    leaving: tuple[Leaving, ...]
    capacity: CapacityGlance | None = None
    """Null: no provider is configured."""
    unheard: tuple[str, ...] = ()
    """Webhook receivers that do not accept messages at present, and why."""
    queue: tuple[str, ...] = ()
    """The queued jobs, the next one first."""
    blocked: str = ""
    """Why they wait for a job that does not train, and what ends that."""
    paused: tuple[PausedJob, ...] = ()
    """Jobs that are paused, or held without the cluster."""
    unsound: Mapping[str, str] = field(default_factory=dict)
    """By name: nodes that the job cannot run on, and why."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """By the store's key, or by sender: records and messages that this sailord cannot read, and
    why. It leaves them alone."""
    refusals: Refusals = Refusals(0, {})
    problems: tuple[str, ...] = ()
    """What may need a person, with its cure where there is one."""
    problems_since: tuple[float, ...] = ()
    """Since when each of them stands; the leader's ``since``: since then or earlier."""
    running: tuple[RunningJob, ...] = ()
    """The jobs that run beside each other, where several share the cluster."""
    usd_per_hour: float | None = None
    """What all nodes cost an hour, used or not; null: a price is not known."""
    last_order: Told | None = None
    """The last order about any job or node, and who gave it; null: none, or too long ago."""
    receivers: tuple[str, ...] | None = None
    """The hosts of the webhook receivers, with their format; null: not said."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan in the format of plan files, and the planner's estimate and reasons."""

    sha256: str
    plan: Mapping[str, Any] | None
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """A job's transitions, oldest first."""

    job: str
    history: tuple[Transition, ...]
    store_away_since: float | None = None
    """If set, these come from memory, without reconfiguration timings."""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a job is in its state and has its plan."""

    job: str
    state: str
    reason: str
    phase: PhaseView | None
    generation_reason: str | None
    plan: tuple[str, ...]
    """The planner's reasons."""
    move: Mapping[str, Any] | None
    last: tuple[Transition, ...]
    store_away_since: float | None = None
    """If set, all this comes from memory."""
    waits_for: tuple[str, ...] = ()
    """If it is queued: the jobs before it."""
    blocked: str = ""
    """If it is queued: why the job that has the cluster keeps it without training."""
    drift: tuple[str, ...] = ()
    """GPU kinds that compute slower or faster than their profile says, beyond its error bar."""
    stuck: tuple[str, ...] = ()
    """Nodes whose drain cannot end, why, and what ends it."""
    idle: tuple[str, ...] = ()
    """Nodes that the plan could use and does not, and when they are looked at next."""
    spent: Spent | None = None
    """If it has the cluster: what it cost."""
    deadline: str = ""
    """If it has one: what is rented for it, and why."""
    why_not_rented: str = ""
    """Why no instance is wanted, if sailord rents and there is no plan."""
    iteration_s: float | None = None
    """What a step of this plan takes, as predicted."""
    said: str = ""
    """What the planner answered last, if nothing followed: why this plan stays, or why there is
    none."""
    next: WhatNext = NOTHING_NEXT
    """If it has the cluster: its next checkpoint and question, if nothing happens before."""
    at: float | None = None
    """When this was answered."""
    cooldowns: tuple[str, ...] = ()
    """If instances of it are missing: the pools from which none are requested for now, and why."""
    place: str = ""
    """If it waits: for whom, for about how long, and from which step it goes on."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events, oldest first."""

    events: tuple[FeedEvent, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """An order was stored; ``is_new``: not by an earlier request with the same id."""

    id: str
    is_new: bool
    then: str = ""
    """What follows, where that is not plain from the order."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Number of accepted messages, and of those that were not known before."""

    accepted: int
    new: int
