"""A question to a planner, and its answer: the plan, its estimate, and how sure we are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from simulator.catalogue import Catalogue
from simulator.cluster import Cluster
from simulator.errors import Problem
from simulator.estimate import Estimate
from simulator.job import Job
from simulator.plan import Plan
from simulator.plan_file import plan_to_json
from simulator.profile import Profile
from simulator.request import Measurements

Space = Literal["full", "paper"]
SPACES: tuple[Space, ...] = ("full", "paper")
DEFAULT_BUDGETS = {"paper": 2000, "event": 150}
"""Plans judged by default: the paper estimator's short form is judged a hundred times faster."""


@dataclass(frozen=True, slots=True)
class ReadMeasurements(Measurements):
    """Measurements whose profiles were read beforehand, so that a search touches no file."""

    known: Mapping[str, Profile] = field(default_factory=dict)

    def profile(self, name: str, *, catalogue: Catalogue) -> Profile:
        if name in self.known:
            return self.known[name]
        return Measurements.profile(self, name, catalogue=catalogue)


def read_ahead(measurements: Measurements, job: Job, catalogue: Catalogue) -> ReadMeasurements:
    """Read the profile that a job names."""
    known = {}
    if job.profile is not None:
        known[job.profile] = measurements.profile(job.profile, catalogue=catalogue)
    return ReadMeasurements(measurements.folder, measurements.paths, measurements.network, known)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Which plan should the job run on?"""

    job: Job
    cluster: Cluster
    measurements: Measurements
    estimator: str = "event"
    space: Space = "full"
    budget: int | None = None
    """Plans that may be judged; never a time, so that the answer is the same everywhere.
    ``None`` is the estimator's default."""
    seconds_left: float | None = None
    """Until the job's deadline, where it has one."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The best plan of a family that was not chosen."""

    family: str
    iteration_s: float
    usd: float | None
    loses: float
    """By how much it is worse than the chosen plan, as a share of the objective."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A planner's word: a plan with its estimate, or why there is none."""

    plan: Plan | None
    estimate: Estimate | None
    evaluations: int
    lower_bound: float
    """No plan of the space has a better objective: seconds, or dollars where the goal is cost."""
    lower_bound_s: float
    """No plan of the space iterates faster."""
    goal: str
    batch_exact: bool = True
    rejected: tuple[Rejected, ...] = ()
    why: tuple[str, ...] = ()
    """Sentences of ``explain``."""
    problems: tuple[Problem, ...] = ()
    """Where there is no plan: what stands in the way, and what would help."""

    @property
    def objective(self) -> float | None:
        """What was minimised: seconds or dollars of an iteration."""
        if self.estimate is None:
            return None
        return self.estimate.money.total_usd if self.goal == "cost" else self.estimate.iteration_s

    @property
    def gap(self) -> float | None:
        """By which share of itself the objective could still be better, at the very most."""
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
            },
            "batch_exact": self.batch_exact,
            "explain": list(self.why),
            "rejected": [
                {
                    "family": r.family,
                    "iteration_s": r.iteration_s,
                    "cost_usd_per_iteration": r.usd,
                    "loses": r.loses,
                }
                for r in self.rejected
            ],
        }


def plan_document(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """What is said of every plan, whoever found it."""
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
