"""A question to the planner and its answer: a plan, its estimate, and a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from simulator.api import Measurements
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import Problem
from simulator.estimate.difference import are_told_apart
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import Catalogue
from simulator.inputs.plan_file import plan_to_json
from simulator.layer_costs.profile import Profile, profile_name
from simulator.spec.job import Goal, Job, Preference
from simulator.spec.plan import Plan

Space = Literal["full", "paper"]
SPACES: tuple[Space, ...] = ("full", "paper")
SEARCHED: Mapping[tuple[str, str], str] = {
    ("event", "full"): "1F1B, one micro batch size, unsplit stages, any placement",
    ("event", "all judged"): "1F1B, one micro batch size, unsplit stages, placed by rule",
    ("event", "zero-bubble"): (
        "1F1B and zero-bubble, one micro batch size, unsplit stages, any placement"
    ),
    ("paper", "full"): "pipelines with equal boundaries",
    ("paper", "paper"): "the published planner's space",
}
"""Which plans the bounds cover, by estimator and space."""
RECOMPUTING = "any number of first layers recomputed"
"""Added to the space where the job leaves it to the planner."""
OUTSIDE = {
    "interleaved": "the plan itself has chunks, and is outside",
    "micro-batch-per-pipeline": (
        "pipelines of the plan itself have micro batch sizes of their own, so it is outside"
    ),
    "sequence": "the ranks of the plan itself share tokens, so it is outside",
}
"""Added to the space where the bounds do not cover the plan, by what it has."""
Tried = Literal["zero-bubble", "offload", "zero1", "outer-steps"]
TRIED: tuple[Tried, ...] = ("zero-bubble", "offload", "zero1", "outer-steps")
"""What plans have only in questions that ask what it would bring."""
CANNOT_RUN: Mapping[Tried, str] = {
    "zero-bubble": "such plans cannot be submitted: no runtime runs them yet",
    "offload": "such plans cannot be submitted: no runtime offloads activations yet",
    "zero1": "no plan of a submitted job overrides training.zero: change it in the job",
    "outer-steps": (
        "such plans cannot be submitted: no runtime takes outer steps yet; the loss would differ,"
        " by how much is not known here"
    ),
}
"""Why no submitted job gets such a plan."""
WHY_NONE: Mapping[Tried, str] = {
    **dict.fromkeys(TRIED, "no plan found with it keeps the limits"),
    "offload": "no good plan recomputes what could be offloaded, or none with it keeps the limits",
}
"""Why no plan was found with something."""
OFFLOAD_OR_NOT = "with offload or without"
"""Added to the space where the bounds cover both."""
EITHER_ZERO = "ZeRO-1 on or off"
"""Added to the space where the bounds cover both."""
OUTER_OR_NOT = "with outer steps or without"
"""Added to the space where the bounds cover both."""
STOPPED = "stopped before its end"
"""The note of an answer after an interruption."""
DEFAULT_BUDGETS = {"paper": 2000, "event": 150}
"""Plans judged by default; the paper's formula judges a plan about 100 times faster."""


@dataclass(frozen=True, slots=True)
class ReadMeasurements(Measurements):
    """Measurements whose profiles are already read, so that a search reads no file."""

    known: Mapping[str, Profile] = field(default_factory=dict)

    def profile(self, name: str, *, catalogue: Catalogue) -> Profile:
        """The profile read beforehand, or else read it now."""
        if name in self.known:
            return self.known[name]
        return Measurements.profile(self, name, catalogue=catalogue)


def read_ahead(measurements: Measurements, job: Job, catalogue: Catalogue) -> ReadMeasurements:
    """Read the profile of a job."""
    found = measurements.profile_of(job, catalogue=catalogue)
    known = {} if found is None else {job.profile or profile_name(job.model.name): found}
    return ReadMeasurements(
        measurements.folder, measurements.paths, measurements.network, measurements.live, known
    )


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Which plan should the job run on?"""

    job: Job
    cluster: Cluster
    measurements: Measurements
    estimator: str = "event"
    space: Space = "full"
    budget: int | None = None
    """Plans that may be judged; ``None`` for the estimator's default. A count rather than a time,
    so that the answer is the same on every machine."""
    seconds_left: float | None = None
    """Seconds until the job's deadline, if it has one."""
    proves: bool = True
    """Whether a small case is searched exhaustively, and the bound takes its time. Switch it off
    where latency matters more than a proof."""
    is_bounded: bool = True
    """Whether the answer has lower bounds, which take longer than the search; else they are 0."""
    gap: float | None = None
    """Search until no plan can be better by more than this share, up to 10 times the budget."""
    prefer: Preference = "fastest"
    """Which of the plans that cannot be told apart is taken, under the event estimator."""
    tries: tuple[Tried, ...] = ()
    """What the plan may have although it cannot be submitted then, under the event estimator."""
    outer_every: int | None = None
    """Iterations between outer steps (``Plan.outer_every``) of plans that can take them."""
    told: Callable[[str], None] | None = None
    """Progress callback of search and bound; called thousands of times."""
    is_stoppable: bool = False
    """Whether an interruption ends the search with the best plan so far, if there is one. Only
    where a person sees the answer's note; else it is raised."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The best plan of a family that was not chosen."""

    family: str
    iteration_s: float
    usd: float | None
    loses: float | None
    """How much worse than the chosen plan, as a share of its objective; ``None``: that is 0."""
    error: float | None = None
    """Error bar of this difference; ``None`` where it is not known."""

    @property
    def is_tied(self) -> bool:
        """Whether it cannot be told apart from the chosen plan."""
        if self.loses is None or self.error is None:
            return False
        return not are_told_apart(1.0, 1.0 + self.loses, self.error)

    def __str__(self) -> str:
        worse = "" if self.loses is None else f", {self.loses:+.1%}"
        tied = f" (±{self.error:.1%}: cannot be told apart)" if self.is_tied else ""
        return f"rejected: {self.family}: {self.iteration_s:.4g} s{worse}{tied}"


@dataclass(frozen=True, slots=True)
class BestByEstimate:
    """The best plan by its estimate, where a cheaper or simpler one was taken instead."""

    goal: Goal
    iteration_s: float
    usd: float | None
    loses: float
    """How much worse the plan taken is, as a share of the objective."""
    error: float
    """Error bar of this difference."""
    saves: float | None
    """Share of its dollars that the plan taken saves; ``None`` where a price is unknown."""
    simpler: str
    """What the plan taken has less of; empty: it is only cheaper."""

    def __str__(self) -> str:
        slower, fastest = ("dearer", "cheapest") if self.goal == "cost" else ("slower", "fastest")
        gains = [] if not self.saves or self.saves <= 0 else [f"{self.saves:.1%} cheaper"]
        gains += [self.simpler] if self.simpler else []
        return (
            f"{self.loses:.1%} {slower} than the {fastest} plan, {self._figure}, ±{self.error:.1%}:"
            f" cannot be told apart; {', '.join(gains) or 'as simple'}"
        )

    @property
    def _figure(self) -> str:
        return f"$ {self.usd:.4g}" if self.goal == "cost" else f"{self.iteration_s:.4g} s"

    def to_json(self) -> dict[str, Any]:
        return {
            "iteration_s": self.iteration_s,
            "cost_usd_per_iteration": self.usd,
            "loses": self.loses,
            "error": self.error,
            "saves": self.saves,
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """What something brings that the question tries."""

    name: Tried
    goal: Goal
    best: float | None
    """The objective of the best plan found with it; ``None``: none keeps the limits."""
    without: float | None
    """The objective of the best plan found without it."""
    is_taken: bool = False
    """Whether the answer's plan has it."""
    why_none: str = ""
    """The reason, where there is no best plan and it is not the usual one."""

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.name}: {self.why_none or WHY_NONE[self.name]}"
        said = f"{self.name}: {self._figure(self.best)}"
        if self.without is None:
            return f"{said}; no plan found without it keeps the limits; {CANNOT_RUN[self.name]}"
        share = self.best / self.without - 1 if self.without > 0 else 0.0
        said += f" instead of {self._figure(self.without)} ({share:+.1%})"
        return f"{said}; {CANNOT_RUN[self.name]}"

    def _figure(self, objective: float) -> str:
        return f"$ {objective:.4g}" if self.goal == "cost" else f"{objective:.4g} s"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "objective": self.best,
            "without": self.without,
            "taken": self.is_taken,
        }


@dataclass(frozen=True, slots=True)
class IdleGpus:
    """GPUs that the plan leaves idle."""

    gpu: str
    zone: str
    gpus: int
    of: int
    loses: float | None
    """How much worse the best judged plan with more of them is; ``None`` if none was judged."""
    reason: Literal["", "does not fit", "does not pay", "does not help"] = ""
    """The reason, if it was searched for."""
    because: str = ""

    def __str__(self) -> str:
        if self.loses is None:
            evidence = "no judged plan uses more of them"
        else:
            worse = "worse" if self.loses >= 0 else "better, which cannot be told apart"
            evidence = f"the best judged plan with more of them is {abs(self.loses):.1%} {worse}"
        parts = [self.reason, self.because or evidence]
        said = ": ".join(part for part in parts if part)
        return f"idle: {self.gpus} of {self.of} {self.gpu} in {self.zone}; {said}"


@dataclass(frozen=True, slots=True)
class OneMoreMachine:
    """The gain of one more machine of a kind in a zone."""

    gpu: str
    zone: str
    gpus: int
    iteration_s: float
    usd: float | None
    seconds_gained: float
    usd_gained: float | None
    """Dollars saved per iteration; negative where the better plan costs more."""
    why_none: str = ""
    """The reason, where there is no gain."""

    def __str__(self) -> str:
        what = f"one more: {self.gpus} x {self.gpu} in {self.zone}"
        if self.why_none:
            return f"{what}: {self.why_none}"
        said = f"{what}: {self.iteration_s:.4g} s an iteration ({-self.seconds_gained:+.3g} s)"
        if self.usd is not None and self.usd_gained is not None:
            said += f", ${self.usd:.4g} (${-self.usd_gained:+.3g})"
        return said


@dataclass(frozen=True, slots=True)
class AnswerReasons:
    """The reasons behind an answer."""

    sentences: tuple[str, ...] = ()
    idle: tuple[IdleGpus, ...] = ()
    one_more: tuple[OneMoreMachine, ...] = ()
    """Computed only on request, since each entry is a search."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The planner's answer: a plan with its estimate, or the reasons why there is none."""

    plan: Plan | None
    estimate: Estimate | None
    evaluations: int
    lower_bound: float
    """Lower bound of the objective over the searched space, in seconds or dollars."""
    lower_bound_s: float
    """Lower bound of the iteration time over the searched space."""
    goal: str
    batch_exact: bool = True
    rejected: tuple[Rejected, ...] = ()
    why: AnswerReasons = field(default_factory=AnswerReasons)
    problems: tuple[Problem, ...] = ()
    """Without a plan: which limits prevent one, and what would help."""
    covered: str = ""
    """Which plans the bounds cover."""
    note: str = ""
    """Why the search ended before it was done, or short of the gap that was asked for."""
    instead_of: BestByEstimate | None = None
    """The best plan by its estimate, if this one was preferred to it."""
    pays_spot_first: bool = False
    """Whether limits in dollars are kept only if spot GPUs are paid before those on demand."""
    gains: tuple[Gain, ...] = ()
    """What each thing brings that the question tries."""

    @property
    def objective(self) -> float | None:
        """The minimised quantity: seconds or dollars of an iteration."""
        if self.estimate is None:
            return None
        return self.estimate.money.total_usd if self.goal == "cost" else self.estimate.iteration_s

    @property
    def space(self) -> str:
        """Which plans the bounds cover, and why they do not cover this plan, if they do not."""
        outside = None if self.plan is None else outside_of(self.plan)
        return self.covered if outside is None else f"{self.covered}; {outside}"

    @property
    def explain(self) -> tuple[str, ...]:
        """All reasons for this plan, as sentences."""
        idle, one_more = map(str, self.why.idle), map(str, self.why.one_more)
        taken = [] if self.instead_of is None else [f"preferred: {self.instead_of}"]
        return (*self.why.sentences, *taken, *idle, *one_more, *map(str, self.rejected))

    @property
    def gap(self) -> float | None:
        """Share by which the objective could improve at most, within the searched space."""
        objective = self.objective
        if objective is None or objective <= 0:
            return None
        return max(0.0, 1 - self.lower_bound / objective)

    def to_json(self, *, seconds: float) -> dict[str, Any]:
        """The form that ``sailorctl plan --json`` prints."""
        assert self.plan is not None
        assert self.estimate is not None
        return plan_document(self.plan, self.estimate) | {
            "planner": "sailor",
            "search": {
                "seconds": seconds,
                "evaluations": self.evaluations,
                "lower_bound_s": self.lower_bound_s,
                "lower_bound": self.lower_bound,
                "gap": self.gap,
                "goal": self.goal,
                "space": self.space,
                **({"note": self.note} if self.note else {}),
            },
            "batch_exact": self.batch_exact,
            "best_by_estimate": self.instead_of and self.instead_of.to_json(),
            **({"tried": [one.to_json() for one in self.gains]} if self.gains else {}),
            "explain": list(self.explain),
            "idle": [asdict(idle) for idle in self.why.idle],
            "one_more": [asdict(one) for one in self.why.one_more],
            "rejected": [
                {
                    "family": r.family,
                    "iteration_s": r.iteration_s,
                    "cost_usd_per_iteration": r.usd,
                    "loses": r.loses,
                    "error": r.error,
                    "told_apart": None if r.error is None else not r.is_tied,
                }
                for r in self.rejected
            ],
        }


def outside_of(plan: Plan) -> str | None:
    """Why the bounds do not cover a plan; ``None``: they do."""
    if plan.sequence_parallel and any(s.tp > 1 for each in plan.pipelines for s in each.stages):
        return OUTSIDE["sequence"]
    if len(plan.sizes) > 1:
        return OUTSIDE["micro-batch-per-pipeline"]
    return OUTSIDE["interleaved"] if plan.schedule == "interleaved" else None


def plan_document(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """The JSON that every planner's plan has in common."""
    found = estimate.to_json()
    kept = (
        *("iteration_s", "iteration_error", "throughput_samples_per_s"),
        *("cost_usd_per_iteration", "egress_usd_per_iteration", "cost_usd_per_hour"),
        *("peak_memory_bytes", "capacity_bytes", "fits", "estimator", "bottleneck", "notes"),
    )
    return {
        "plan": plan_to_json(plan),
        "estimate": {key: found[key] for key in kept},
        "gpus_used": plan.gpus_used(),
    }
