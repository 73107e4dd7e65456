"""What the API answers, as types: the document is made from them, and so is every answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agents.protocol.records import Durable, GenerationRecord, JobRecord
from sailord.cluster_records import Transition
from sailord.notify.feed import Happening

SeenState = Literal["joining", "ready", "draining", "cordoned", "slow", "suspect", "lost"]
PhaseName = Literal[
    "waiting", "planning", "opening", "starting", "running", "stopping", "closing", "held"
]


@dataclass(frozen=True, slots=True)
class ProblemView:
    """One thing that is wrong, and what would help."""

    place: str
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class Problems:
    """Why something was refused."""

    problems: tuple[ProblemView, ...]


@dataclass(frozen=True, slots=True)
class Live:
    """The loop turns."""

    live: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Somebody leads; ``leads``: this one."""

    ready: bool
    leads: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """One life of a machine."""

    id: str
    name: str
    state: SeenState
    zone: str
    machine: str
    gpu: str
    gpus: int
    spot: bool
    address: str
    cordoned: bool
    leaves_at: float | None
    """When it goes away, in seconds since 1970, if that was announced."""
    taking: str | None
    generation: int | None
    step: int | None
    failure: str
    why_lost: str
    trouble: str
    """What keeps its snapshots from where they should be."""
    safe_to_stop: bool
    """It is to go away, and no job needs anything on it any more."""
    unsound: str
    """Why no plan uses it: a device is broken, or its memory has no room for snapshots."""
    slow: str
    """How much slower it computes than it should; where it trains on nevertheless, also why."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes, by name."""

    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class PhaseView:
    """What a job is at, since when, and until when that may take."""

    name: PhaseName
    since: float | None
    deadline: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class JobView(JobRecord):
    """A job's record, and where it stands."""

    generation: GenerationRecord | None = None
    phase: PhaseView | None = None
    """Of the active job only."""
    step: int | None = None
    durable: Durable | None = None


@dataclass(frozen=True, slots=True)
class Submitted(JobRecord):
    """A job's record as it was stored, and what may be wrong with the job."""

    warnings: tuple[str, ...] = ()
    """Files that cannot be seen from here, and that each node must have."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """All jobs: the active one first, then the queue and those that ended."""

    jobs: tuple[JobRecord, ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner said of the plan; null where a price or a plan is missing."""

    iteration_s: float | None
    tokens_per_s: float | None
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the last steps took; null before enough were seen."""

    iteration_s: float | None
    tokens_per_s: float | None
    loss: float | None
    stall_s: float | None
    """How long the last snapshot made a step wait."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What the job has cost so far, and what it costs now."""

    usd: float
    """Without the time at unknown prices."""
    unpriced_s: float
    usd_per_hour: float | None
    """Of what runs now; null where a price is not known, zero where nothing runs."""
    usd_max: float | None
    """Its budget, if it has one."""


@dataclass(frozen=True, slots=True)
class ActiveView:
    """The job that has the cluster."""

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
    durable_step: int | None
    durable_age_s: float | None
    steps_at_risk: int
    """Done since the last durable step."""
    storage_trouble: str
    """Why the durable store took nothing of late."""
    troubles: tuple[str, ...]
    """What its nodes' uploads and copies of snapshots came up against of late."""
    failures: int
    spent: Spent


@dataclass(frozen=True, slots=True)
class LeaderView:
    """Who leads."""

    host: str
    address: str


@dataclass(frozen=True, slots=True)
class StoreView:
    """Whether the store answers, and if not, since when."""

    answers: bool
    away_since: float | None
    trouble: str = ""
    """What was last heard of it while it is away, or why it does not take what is to be written."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A node that goes away, and when, if that is known."""

    name: str
    leaves_at: float | None
    safe_to_stop: bool
    """No job needs anything on it any more."""


@dataclass(frozen=True, slots=True)
class CapacityGlance:
    """Rented machines in numbers; /v1/capacity tells the rest."""

    wanted: int
    up: int
    awaited: int
    """Made, and their agents have not registered yet."""
    asked: int
    """Asked for, and not answered yet."""
    resting: int
    """Pools that are not asked now, since they refused."""
    usd_per_hour: float
    spent_usd: float
    stop: str
    """Of a total budget: empty, ``parting`` or ``ended``."""
    orphans: tuple[str, ...]
    """Machines that would not be deleted."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything at a glance."""

    cluster: str
    at: float
    leads: bool
    term: int | None
    leader: LeaderView | None
    store: StoreView
    job: ActiveView | None
    queued: int
    nodes: Mapping[str, int]
    """How many are in which state."""
    leaving: tuple[Leaving, ...]
    capacity: CapacityGlance | None = None
    """Null: machines come by themselves."""
    unheard: tuple[str, ...] = ()
    """Receivers of webhooks that do not take what they are told now, and why."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan in the form of plan files, and what the planner said of it."""

    sha256: str
    plan: Mapping[str, Any] | None
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """A job's transitions, oldest first."""

    job: str
    history: tuple[Transition, ...]
    store_away_since: float | None = None
    """If so, these are what sailord remembers, without what moves took."""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a job is where it is."""

    job: str
    state: str
    reason: str
    phase: PhaseView | None
    generation_reason: str | None
    plan: tuple[str, ...]
    """The planner's own reasons."""
    move: Mapping[str, Any] | None
    last: tuple[Transition, ...]
    store_away_since: float | None = None
    """If so, all this is what sailord remembers."""
    waits_for: tuple[str, ...] = ()
    """If it waits for its turn: the jobs before it."""


@dataclass(frozen=True, slots=True)
class Events:
    """What happened, oldest first."""

    events: tuple[Happening, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """An order stands in the store; ``is_new``: it did not before."""

    id: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """So many messages were taken, and so many of them were not known before."""

    accepted: int
    new: int
