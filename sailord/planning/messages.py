"""Requests to the planner's processes and their answers, as they travel between processes.

Planner processes import this module and ``job_spec``, never the controller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agents.protocol.records import GenerationRecord, NodeRecord
from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.replan.past_moves import PastMove
from sailord.core.model.proposal import Proposal
from simulator.documents.problems import Problem


@dataclass(frozen=True, slots=True)
class MoveContext:
    """What the planner needs to judge a reconfiguration, beyond the nodes and the running plan."""

    now_s: float = 0.0
    history: LifetimeHistory = field(default_factory=LifetimeHistory)
    """Losses and lifetimes of nodes by pool."""
    age_s: tuple[tuple[str, float], ...] = ()
    """Uptime of each node; a node that is missing counts as up forever."""
    last_move_s: float | None = None
    """When the job last reconfigured voluntarily."""
    settle_s: float = 30.0
    """How long to gather new nodes before asking about them."""
    left_s: float | None = None
    """Seconds until the job is done, at its present speed; ``None``: not known, or endless."""
    moves: tuple[PastMove, ...] = ()
    """The last moves of this cluster, oldest first."""


NO_CONTEXT = MoveContext()


@dataclass(frozen=True, slots=True, order=True)
class PoolPrice:
    """What the provider charges for machines of one zone, type and contract."""

    zone: str
    machine: str
    gpu: str
    spot: bool
    usd_per_gpu_hour: float


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Which plan should the job run on these nodes?"""

    spec: str
    cluster_file: Path
    profiles: Path | None
    nodes: tuple[NodeRecord, ...]
    running: bytes | None
    """The plan that runs, or ran last."""
    ran_on: tuple[NodeRecord, ...]
    leaving: tuple[str, ...] = ()
    """The ids of those that no plan may use, and that go on until the job has stopped."""
    links: tuple[Path, int] | None = None
    """The file of measured links, and when it changed."""
    is_urgent: bool = False
    """Nothing runs: return the first good plan instead of searching on."""
    past: MoveContext = NO_CONTEXT
    factors: tuple[tuple[str, float], ...] = ()
    """Measured over predicted compute time, by GPU kind."""
    ratios: tuple[tuple[int, float], ...] = ()
    """Measured over predicted compute time, by rank of the running plan."""
    predicted: tuple[float, ...] = ()
    """The predicted compute times, by rank."""
    relative_error: float = 0.0
    """The error bar of that prediction."""
    slow: tuple[tuple[str, float], ...] = ()
    """Stragglers and cordoned nodes of the running plan, left out of ``nodes``, and their slowdown
    factors (1 if only cordoned): is there a better plan without them?"""
    keeps_deadline: bool = False
    """The machines are rented for the job's deadline, and chosen by what they cost: the plan on
    them is for speed."""
    begun: int = 0
    """The step of the checkpoint that the job was submitted to continue from."""
    usd_max: float | None = None
    """The job's total budget; ``None``: that of its file."""
    kinds: tuple[str, ...] = ()
    """The GPU kinds of all nodes, also of those that other jobs have."""
    prices: tuple[PoolPrice, ...] = ()
    """Of the provider's pools; all other nodes cost what the cluster file says."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan with the planner's proposal, ready to be stored."""

    proposal: Proposal
    plan: bytes
    about: dict[str, Any]
    """The planner's estimate and reasons, to compare with measurements."""

    @property
    def about_bytes(self) -> bytes:
        return json.dumps(self.about, allow_nan=False).encode()


class NoAnswer(str):
    """Why the planner did not answer (timeout, dead process); the request is worth a retry.

    A plain ``str`` in its place is an answer: there is no plan, and why.
    """


class Unpaid(str):
    """Why there is no plan, if a limit of the job in dollars is in the way."""


def why_none(problems: Sequence[Problem]) -> str:
    """Return why there is no plan."""
    is_unpaid = any(each.place.startswith("objective.max_usd") for each in problems)
    return (Unpaid if is_unpaid else str)("; ".join(map(str, problems)) or "no plan fits")


def predicted_phases(
    move: Mapping[str, Any] | None, which: Literal["phases", "uncorrected"] = "phases"
) -> tuple[tuple[str, float], ...]:
    """Predicted seconds of each reconfiguration phase, under the names of the measured phases."""
    phases = {} if move is None else move.get(which, {})
    return tuple((name.removesuffix("_s"), seconds) for name, seconds in phases.items())


def repeat_plan(
    record: GenerationRecord, plan: bytes, about: Mapping[str, Any]
) -> FoundPlan | None:
    """Return the generation's plan again on the same nodes, without asking the planner.

    ``None`` if the stored ``about`` lacks the cost of a restart (written by an older version).
    """
    again = about.get("again")
    if again is None:
        return None
    proposal = Proposal(
        record.plan,
        record.members,
        is_worth_it=True,
        why="the same plan again: all its nodes are there",
        iteration_s=about["estimate"]["iteration_s"],
        plain_s=record.predicted_s or None,
        move_s=again["seconds"],
        next_move_s=again.get("replacement_s"),
        usd_per_hour=record.usd_per_hour,
        busy=record.busy,
        peaks=record.peaks,
        worths=record.worths,
        move_phases=predicted_phases(again),
        move_uncorrected=predicted_phases(again, "uncorrected"),
        write_s=about.get("write_s", 0.0),
    )
    return FoundPlan(proposal, plan, {**about, "why": [proposal.why], "move": again})


@dataclass(frozen=True, slots=True)
class PoolSupply:
    """Identical machines of one zone and contract: how many are up, how many more can be rented."""

    zone: str
    machine: str
    gpu: str
    gpus: int
    spot: bool
    up: int
    obtainable: int
    usd_per_hour: float | None
    unrented: int = 0
    """Of those that are up: machines that were not rented by sailord."""
    ready: int = 0
    """Of those that are up: machines that the job could use now."""
    flex: bool = False
    """Requests wait in a queue of the provider, maybe for hours."""

    @property
    def price(self) -> PoolPrice | None:
        """What the provider charges, for each GPU; ``None``: unknown."""
        if self.usd_per_hour is None:
            return None
        each = self.usd_per_hour / self.gpus
        return PoolPrice(self.zone, self.machine, self.gpu, self.spot, each)

    @property
    def is_on_demand(self) -> bool:
        return not self.spot and not self.flex


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """What is left of a job with a deadline."""

    steps: float
    seconds: float
    """Until the deadline, at the predicted speed of steps: fewer if steps take longer."""
    spot_share: float
    """Of this time, the share that is expected to have spot machines."""


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """Which machines should there be?"""

    spec: str
    cluster_file: Path
    profiles: Path | None
    pools: tuple[PoolSupply, ...]
    usd_per_hour_max: float | None
    move_s: float
    """Assumed duration of the reconfiguration once the machines are up."""
    links: tuple[Path, int] | None = None
    """The file of measured links, and when it changed."""
    usd_left: float | None = None
    """What is left of a total budget: a more expensive plan has to pay off before it is spent."""
    on_demand_min: int = 0
    """At least this many machines are on demand, where available."""
    past: MoveContext = NO_CONTEXT
    left: WorkLeft | None = None
    """The job has to be done by a deadline: on-demand machines are looked at apart."""
    begun: int = 0
    """The step of the checkpoint that the job was submitted to continue from."""
    usd_max: float | None = None
    """The job's total budget; ``None``: that of its file."""


@dataclass(frozen=True, slots=True)
class EndRequest:
    """How soon, and for how much, could the job be done?"""

    spec: str
    cluster_file: Path
    profiles: Path | None
    links: tuple[Path, int] | None
    pools: tuple[PoolSupply, ...] | None
    """All machines that there could be; ``None``: those of the cluster file."""
    usd_per_hour_max: float | None = None
    begun: int = 0
    """The step of the checkpoint from which it begins."""


@dataclass(frozen=True, slots=True)
class MachineChoice:
    """Machines by pool, in the request's order, and what the best plan on them does."""

    counts: tuple[int, ...]
    step_s: float
    usd_per_hour: float | None

    @property
    def step_usd(self) -> float | None:
        """Dollars of a step; ``None``: a price is not known."""
        return None if self.usd_per_hour is None else self.usd_per_hour * self.step_s / 3600


@dataclass(frozen=True, slots=True)
class DeadlineChoices:
    """What a job with a deadline could run on; ``None``: there is no plan."""

    spot: tuple[int, ...]
    """Machines to have while the job does without on-demand ones that are rented for it."""
    spot_now: MachineChoice | None
    """The best plan on those of them that it could use now."""
    on_demand: MachineChoice | None
    """The best plan on on-demand machines alone, by the job's goal."""
    fastest: MachineChoice | None
    """The fastest plan on on-demand machines alone."""
    why_not: str = ""
    """Why there is no plan on on-demand machines."""
    is_spot_dear: bool = False
    """Spot machines cost as much by the step as on-demand ones: none of them is wanted."""


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Wanted machines by pool, in the request's order; ``None``: there is no plan."""

    counts: tuple[int, ...] | None
    why: str
    choices: DeadlineChoices | None = None
    """For a job with a deadline, if there are machines of both contracts."""
