"""What the controller knows: the nodes, the jobs, and the one job that has the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from agents.protocol.records import (
    Durable,
    Evaluation,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Order,
    Point,
    Report,
)
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.options import Options
from sailord.core.model.phases import Phase
from sailord.core.model.proposal import Proposal
from sailord.core.model.stragglers import NodeSpeeds, Straggler


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """An open question to the planner; training goes on meanwhile, the phase's rule waits."""

    request: int
    nodes: tuple[NodeId, ...]
    reason: str
    is_forced: bool
    """Something must change: a node is lost or draining, or an operator ordered it."""
    deadline: float
    answer: Proposal | str | None = None
    """A plan, or why there is none."""
    is_unpaid: bool = False
    """There is none, since a limit of the job in dollars is in the way."""
    slow: Mapping[NodeId, Straggler] = field(default_factory=dict)
    """Stragglers that the question leaves out."""
    trouble: str = ""
    """Why no answer will come, where that is known before the deadline."""
    is_ordered: bool = False
    """An operator ordered a new plan, and this question settles the order; ``reason`` may name
    other causes alone."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the generation came."""

    step: int = 0
    """The highest step that any member reported as done."""
    advanced_at: float = 0.0
    """When it did; at first, when the generation began."""
    step_s: float | None = None
    """Seconds of a step, a moving average over the last ones; at first, as measured under the last
    plan and scaled by the predictions of both."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failures in a row and the backoff after them."""

    failures: int = 0
    """Failed generations in a row that no lost node explains."""
    failed_at: int = 0
    """The step at which the last one failed."""
    not_before: float = 0.0
    """No question to the planner before this moment."""


@dataclass(frozen=True, slots=True)
class LastQuestion:
    """The last question to the planner, so that the same is not asked again at once."""

    nodes: frozenset[NodeId] = frozenset()
    _: KW_ONLY
    at: float = 0.0
    is_refused: bool = False
    """There is no plan for these nodes."""
    is_unpaid: bool = False
    """A limit of the job in dollars is in the way of one."""
    is_last_resort: bool = False
    """The question was repeated with the members that leave, since without them there is no
    plan."""
    said: str = ""
    """What the planner answered last in this phase, if nothing followed: why there is no plan, or
    why the running one stays."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that is being committed."""

    point: Point
    durable: Durable | None = None
    """Its manifest, once that is written."""
    is_storing: bool = False
    """It is being stored; the next generation may begin from it."""


@dataclass(frozen=True, slots=True)
class Securing:
    """A point that agents make durable now, independent of the interval."""

    point: Point
    until: float


@dataclass(frozen=True, slots=True)
class Check:
    """A check whether the newest checkpoint is readable."""

    of: Durable
    found: Durable | None = None
    """The newest readable one; ``None``: not known yet, or there is none."""
    why_none: str = ""
    """Why no checkpoint is readable."""
    since: float = 0.0
    """When the check began."""
    step_max: int | None = None
    """Only checkpoints of this step or before count: replicas differed later."""


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
    differed_at: float | None = None
    """When members reported that replicas differ, until it is decided what follows."""
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

    speeds: NodeSpeeds = field(default_factory=NodeSpeeds)
    kept: Mapping[NodeId, KeptStraggler] = field(default_factory=dict)
    """Those that it was decided to go on with."""


@dataclass(frozen=True, slots=True)
class Active:
    """The one job that has the cluster."""

    job: JobId
    phase: Phase
    generation: GenerationRecord | None = None
    question: OpenQuestion | None = None
    """To the planner; only while the job waits, starts or runs."""
    orders: tuple[Order, ...] = ()
    """Orders of operators that are not yet carried out, in the order in which they were given."""
    progress: Progress = field(default_factory=Progress)
    attempts: Attempts = field(default_factory=Attempts)
    asked: LastQuestion = field(default_factory=LastQuestion)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    slowness: Slowness = field(default_factory=Slowness)
    evaluations: tuple[Evaluation, ...] = ()
    """The last ones that a member reported, the oldest first."""
    unlogged: str = ""
    """Why loggers of its script are not used any more, as a member reported last."""
    may_start_over: bool = False
    """An operator resumed it after every copy of its state was lost, so it may start from step
    0."""
    unanswered: int = 0
    """Questions in a row that the planner did not answer."""
    rejected: str = ""
    """Why the store rejects a write of the job for good, so that the job must be held."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the controller knows; the same events give the same state."""

    options: Options = field(default_factory=Options)
    now: float = 0.0
    term: int | None = None
    """Our term as leader; ``None`` while another sailord is the leader."""
    led_since: float | None = None
    """When our term began."""
    leases_since: float = 0.0
    """Since when a missing lease says something: we lead, and the store answers."""
    woken_at: float = 0.0
    """The end of our last pause of ``nap_s``: steps from then are only reported now."""
    nodes: Nodes = field(default_factory=Nodes)
    jobs: Mapping[JobId, JobRecord] = field(default_factory=dict)
    """All jobs, the active one among them."""
    generations: Mapping[JobId, GenerationRecord] = field(default_factory=dict)
    """The last generation of each job that is not active."""
    durables: Mapping[JobId, Durable] = field(default_factory=dict)
    active: Active | None = None
    known_orders: frozenset[str] = frozenset()
    """The ids of all orders that were taken in: each has one effect."""
    marks: Mapping[str, tuple[Order, ...]] = field(default_factory=dict)
    """Orders about each node id, in order: they hold for as long as that node lives."""
    rollbacks: Mapping[JobId, Order] = field(default_factory=dict)
    """Of jobs without the cluster: carried out once the job gets it."""
    unpaid: Mapping[JobId, float] = field(default_factory=dict)
    """When queued jobs let others go first, since their limits in dollars paid for no plan."""
    unreadable: frozenset[JobId] = frozenset()
    """Jobs that may have the cluster, but whose records cannot be read: no other gets it."""
    requests: int = 0

    @property
    def job(self) -> JobRecord:
        """The record of the active job."""
        assert self.active is not None, "no job is active"
        return self.jobs[self.active.job]

    def with_job(self, job: JobRecord) -> State:
        """Return the state with this record of a job; rules call ``write_job``, which stores it."""
        return replace(self, jobs={**self.jobs, job.id: job})

    def reports_of(self, generation: GenerationRecord) -> Iterator[tuple[NodeId, Report]]:
        """Yield the reports of the generation's members that are about it."""
        for id_ in generation.members:
            report = self.nodes[id_].report if id_ in self.nodes else None
            if report is not None and report.speaks_of(generation):
                yield id_, report

    def lease_of(self, node: Node) -> float:
        """Seconds after which the store drops the node's lease if it is not renewed."""
        return node.record.lease_s or self.options.lease_s

    def trusted_since(self, node: Node) -> float:
        """From when on the node's missing lease counts against it."""
        return self.leases_since + self.lease_of(node) + self.options.grace_s
