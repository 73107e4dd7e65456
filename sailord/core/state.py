"""The controller's nouns: what it knows, the phases of a job, what happens and what it orders.

Events are facts in the past tense, each with its moment ``at``; commands are orders. Every
command ends in an event, even in failure. All of it is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    Intent,
    JobId,
    JobRecord,
    JobState,
    NodeId,
    NodeRecord,
    Point,
    Report,
)
from sailord.core.checkpoint_records import (
    Check,
    CheckDurable,
    CheckpointCommitted,
    CollectGarbage,
    Commit,
    CommitCheckpoint,
    CommitFailed,
    DurableChecked,
    ManifestWritten,
    Securing,
    WriteManifest,
)
from sailord.core.nodes import Node, Nodes
from sailord.core.options import Options
from sailord.core.proposal import Proposal
from sailord.core.straggler_detection import Slow, Watch

# ---- the phases of a job --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """No healthy generation runs; nothing was asked yet, or nothing fits what is there."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Starting:
    """The generation stands in the store; its members fetch, rebuild and verify."""

    since: float
    deadline: float
    move_s: float
    """What the planner predicted, to be compared with what it takes."""


@dataclass(frozen=True, slots=True)
class Running:
    """Every member trains."""

    since: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """All members park at one step's end: for another plan, or for good."""

    then: Proposal | JobState
    reason: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The next generation's record is on its way into the store."""

    record: GenerationRecord
    proposal: Proposal
    lowers: Durable | None = None
    """The checkpoint that counts as the newest from then on, where that is an older one."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The generation's end is on its way into the store."""

    then: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """Parked until a person says resume; snapshots stay alive."""

    reason: str
    since: float


Phase = Waiting | Starting | Running | Stopping | Opening | Closing | Held


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner was asked; it is open beside the phase, and what runs goes on meanwhile."""

    request: int
    nodes: tuple[NodeId, ...]
    reason: str
    is_forced: bool
    """Something must change: a node is lost or draining, or an operator ordered it."""
    deadline: float
    answer: Proposal | str | None = None
    """A plan, or why there is none."""
    slow: Mapping[NodeId, Slow] = field(default_factory=dict)
    """Stragglers that the question leaves out."""
    trouble: str = ""
    """Why no answer will come, where that is known before the deadline."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the generation came."""

    step: int = 0
    """The highest step that any member reported as done."""
    advanced_at: float = 0.0
    """When it did; at first, when the generation began."""
    step_s: float | None = None
    """Seconds of a step, a moving average over the last ones."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failures in a row and the backoff after them."""

    failures: int = 0
    """Failed generations in a row that no lost machine explains."""
    comebacks: int = 0
    """How often the job left the smallest plan again, for one that may fail like those before."""
    not_before: float = 0.0
    """No question to the planner before this moment."""


@dataclass(frozen=True, slots=True)
class LastQuestion:
    """What the planner was asked last: the same is not asked again at once."""

    nodes: frozenset[NodeId] = frozenset()
    at: float = 0.0
    is_refused: bool = False
    """There is no plan for these nodes."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What is being made durable, checked and removed for this job."""

    commit: Commit | None = None
    retry_at: float = 0.0
    """The durable store failed; it is not asked again before this moment."""
    trouble: str = ""
    """How it failed."""
    failed_at: Point | None = None
    """The checkpoint that it did not take."""
    securing: Securing | None = None
    check: Check | None = None
    swept: tuple[int, Durable] | None = None
    """The generation and the checkpoint after which garbage was collected last."""


@dataclass(frozen=True, slots=True)
class KeptStraggler:
    """A straggler that stays in the plan for now."""

    until: float
    why: str


@dataclass(frozen=True, slots=True)
class Slowness:
    """The stragglers of the generation."""

    watch: Watch = field(default_factory=Watch)
    kept: Mapping[NodeId, KeptStraggler] = field(default_factory=dict)
    """Those that it was decided to go on with."""


@dataclass(frozen=True, slots=True)
class Active:
    """The one job that has the cluster."""

    job: JobId
    phase: Phase
    generation: GenerationRecord | None = None
    question: Question | None = None
    """To the planner; only while the job waits, starts or runs."""
    orders: tuple[Intent, ...] = ()
    """Orders of operators that are not yet carried out, in the order in which they were given."""
    progress: Progress = field(default_factory=Progress)
    attempts: Attempts = field(default_factory=Attempts)
    asked: LastQuestion = field(default_factory=LastQuestion)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    slowness: Slowness = field(default_factory=Slowness)


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the controller knows; the same events give the same state."""

    options: Options = field(default_factory=Options)
    now: float = 0.0
    term: int | None = None
    """Our term as leader; ``None`` while somebody else leads."""
    leases_since: float = 0.0
    """Since when leases mean something: we lead and the store answers."""
    woken_at: float = 0.0
    """When we last went on after a nap: steps that were done meanwhile are only heard of now."""
    nodes: Nodes = field(default_factory=Nodes)
    jobs: Mapping[JobId, JobRecord] = field(default_factory=dict)
    """All jobs, the active one among them."""
    generations: Mapping[JobId, GenerationRecord] = field(default_factory=dict)
    """The last generation of each job that is not active."""
    durables: Mapping[JobId, Durable] = field(default_factory=dict)
    active: Active | None = None
    intents: frozenset[str] = frozenset()
    """Those that were heard of: each has one effect."""
    marks: Mapping[str, tuple[Intent, ...]] = field(default_factory=dict)
    """What was said of each life of a node, in its order: it holds for as long as that lives."""
    requests: int = 0

    @property
    def job(self) -> JobRecord:
        """The record of the active job."""
        assert self.active is not None, "no job is active"
        return self.jobs[self.active.job]

    def with_job(self, job: JobRecord) -> State:
        """Return the state with this record of a job; whoever changes one emits ``WriteJob``."""
        return replace(self, jobs={**self.jobs, job.id: job})

    def lease_of(self, node: Node) -> float:
        """After so long without a word the store forgets the node."""
        return node.record.lease_s or self.options.lease_s

    def trusted_since(self, node: Node) -> float:
        """From then on it says something about the node that it has no lease."""
        return self.leases_since + self.lease_of(node) + self.options.grace_s


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """We lead. Everything that the store holds was read in one look."""

    at: float
    term: int
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    generations: tuple[GenerationRecord, ...]
    durables: tuple[tuple[JobId, Durable], ...] = ()
    intents: tuple[Intent, ...] = ()
    """Those that still hold, in the order in which they were given."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """We lead no more, or could no longer be sure of it."""

    at: float


@dataclass(frozen=True, slots=True)
class NodesObserved:
    """All nodes that have a lease at this moment."""

    at: float
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent told how it stands."""

    at: float
    report: Report
    others: tuple[Report, ...] = ()
    """Of other nodes, that came in the same moment: one decision answers them all."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """An agent left a probe unanswered."""

    at: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class IntentGiven:
    """Somebody warned of something or ordered something."""

    at: float
    intent: Intent
    others: tuple[Intent, ...] = ()
    """Found in the same look, in the order in which they were given: notices of a whole rack are
    one decision."""


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job stands in the queue."""

    at: float
    job: JobRecord
    durable: Durable | None = None


@dataclass(frozen=True, slots=True)
class PlanFound:
    """The planner answered."""

    at: float
    request: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """There is no plan for the nodes asked about, or nobody could find out."""

    at: float
    request: int
    why: str
    is_known: bool = True
    """False: this says nothing of the nodes, and the same question is worth another try."""


@dataclass(frozen=True, slots=True)
class GenerationWritten:
    """The store holds this record now."""

    at: float
    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """The store holds something else than we thought: somebody else leads."""

    at: float


@dataclass(frozen=True, slots=True)
class StoreReturned:
    """The store answers again after it was away; leases may have ended meanwhile."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    at: float


Event = (
    Elected
    | Deposed
    | NodesObserved
    | Reported
    | ProbeFailed
    | IntentGiven
    | JobSubmitted
    | PlanFound
    | PlanRefused
    | GenerationWritten
    | WriteRefused
    | ManifestWritten
    | CheckpointCommitted
    | CommitFailed
    | DurableChecked
    | StoreReturned
    | Ticked
)


# ---- commands ---------------------------------------------------------------------------------
#
# Those that write to the store are carried out in their order, each once the one before it is
# settled: an order is forgotten only after what came of it is stored.


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Ask the planner; ends in ``PlanFound`` or ``PlanRefused``."""

    request: int
    job: JobId
    nodes: tuple[NodeId, ...]
    running: GenerationRecord | None
    is_safe: bool
    """The smallest plan that is sure to work, after several that failed."""
    slow: Mapping[NodeId, float] = field(default_factory=dict)
    """Members that are not among the nodes, as they take so many times as long as they should: is
    there anything better than to go on with them?"""
    is_urgent: bool = False
    """Nothing runs that could go on while the planner searches."""
    repeats: bool = False
    """The plan that ran last is answer enough: nothing runs, and all its nodes are there."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of GPU: what it was seen to compute over what was predicted."""


@dataclass(frozen=True, slots=True)
class WriteGeneration:
    """Store the record if ``replaces`` still stands there and the term is ours.

    Ends in ``GenerationWritten`` or ``WriteRefused``; a write whose fate is unknown is settled
    by reading, so that repeating this order is harmless.
    """

    record: GenerationRecord
    replaces: GenerationRecord | None
    lowers: Durable | None = None
    """Store this as the newest checkpoint with it, though it is an older one."""
    settles: str = ""
    """The order that it carries out, to be forgotten with it: nobody carries it out again."""


@dataclass(frozen=True, slots=True)
class GiveIntent:
    """Store what was found out of a node, so that every leader hears of it."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class SettleIntent:
    """An order was carried out: a later leader need not hear of it."""

    id: str


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Store a job's new state."""

    job: JobRecord


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Tell agents that a generation is over: what waits in it is broken off."""

    job: JobId
    generation: int
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class WakeAgents:
    """Tell agents to read the store now instead of when the watch gets there."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ProbeAgent:
    """Ask an agent for its report; ends in ``Reported`` or ``ProbeFailed``."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up leading; whoever leads next reads everything anew."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the log and the history."""

    text: str
    job: JobId | None = None
    is_transition: bool = False


Command = (
    RequestPlan
    | WriteGeneration
    | WriteManifest
    | CommitCheckpoint
    | CheckDurable
    | CollectGarbage
    | WriteJob
    | GiveIntent
    | SettleIntent
    | AbortGeneration
    | WakeAgents
    | ProbeAgent
    | Resign
    | Note
)
