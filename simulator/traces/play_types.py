"""What a policy on an availability trace sees and decides, and what it achieves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from simulator.traces.trace import GpuCounts, LostSlots

EPS = 1e-6
"""Rounding tolerance, in iterations, for one that ends exactly at a boundary."""
JobActivity = Literal["training", "reconfiguring", "idle"]
Ending = Literal["trace", "steps", "budget"]


@dataclass(frozen=True, slots=True)
class ReconfigurationCosts:
    """Seconds that reconfigurations and checkpoints take; the defaults are assumptions."""

    planned_s: float = 5.0
    """Live reconfiguration of a running job: stop, fetch state, rebuild groups, verify."""
    unplanned_s: float = 10.0
    """Live reconfiguration after a loss: as a planned one, plus detection and abort."""
    restart_s: float = 120.0
    """Restart from the durable checkpoint: start processes, read the state from the store."""
    checkpoint_every_s: float = 600.0
    """Time between two durable checkpoints, unless the policy chooses another interval."""
    snapshot_steps: int = 1
    """Steps between two snapshots in node memory."""
    survive_share: float = 0.5
    """Snapshots have one replica on another machine; they count as lost once fewer than this
    share of the plan's GPUs are left."""
    checkpoint_share: float = 0.01
    """What a checkpoint costs, as a share of a step, since its upload competes with training."""

    def step_s(self, iteration_s: float, every_s: float) -> float:
        """Seconds of an iteration, with its share of checkpoints at this interval."""
        return iteration_s * (1 + self.checkpoint_share / steps_between(iteration_s, every_s))


def steps_between(iteration_s: float, seconds: float) -> int:
    """Iterations that take at least this many seconds; at least 1."""
    return max(1, math.ceil(seconds / iteration_s - EPS))


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a job ends before its trace does."""

    steps: int | None = None
    max_usd: float | None = None
    """Dollars that may be spent in total."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What the player needs to know about a plan."""

    iteration_s: float
    samples: int
    """Per iteration."""
    gpus: GpuCounts
    """GPUs that the plan uses, by pool."""
    usd_per_s: float | None
    """Price of these GPUs; ``None`` where a price is unknown."""
    egress_usd: float = 0.0
    """Per iteration."""
    checkpoint_s: float = 0.0
    """Time from the start of a durable checkpoint until all of it is written."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.iteration_s

    @property
    def usd_per_running_s(self) -> float | None:
        """Dollars per second of training, egress included."""
        if self.usd_per_s is None:
            return None
        return self.usd_per_s + self.egress_usd / self.iteration_s


@dataclass(frozen=True, slots=True)
class AvailabilitySpan:
    """A span of time in which the same GPUs are up."""

    start_s: float
    end_s: float
    state: int
    """Number of this availability; equal availabilities share it."""
    up: GpuCounts
    """GPUs that are up, by pool."""
    lost: LostSlots
    """Which GPUs of each pool were lost at its start; a plan uses the first ones."""
    notice_s: float = 0.0
    """How long a plan may still use GPUs whose loss is announced."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a policy knows when it decides."""

    now_s: float
    span: int
    """Index of the current availability span."""
    state: int
    up: GpuCounts
    """GPUs that are up, by pool."""
    plan: int | None
    """Index of the plan that runs or is being started."""
    resumes_s: float = 0.0
    """When the iterations of the plan begin, or began; later than ``now_s`` during a
    reconfiguration."""
    is_cold: bool = False
    """Whether the state is still to be read from the durable checkpoint."""
    leaves_s: float = math.inf
    """When an announced loss first takes GPUs of the plan."""
    lost: LostSlots = ()
    """GPUs lost at the start of the current span, by pool."""
    steps: int = 0
    """Steps that are done and count so far."""
    usd: float | None = 0.0
    """Dollars spent so far."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan to run from now on (``None``: none), and when to ask again at the latest."""

    plan: int | None
    """While a loss of its GPUs is announced, the running plan moves to others that are up, unless
    ``trains_on``; where it would not fit there, it trains on until they are lost."""
    wake_s: float = math.inf
    checkpoint_every_s: float | None = None
    """Interval of durable checkpoints once the plan starts; ``None``: that of the costs."""
    trains_on: bool = False
    """The running plan stays on GPUs whose loss is announced, until the next decision."""


class Policy(Protocol):
    """Chooses plans; it is asked at every change of capacity, after every reconfiguration and
    at the ``wake_s`` of its last decision."""

    @property
    def name(self) -> str: ...

    @property
    def is_live(self) -> bool:
        """Whether it reconfigures the running job, or restarts from the durable checkpoint."""
        ...

    def decide(self, view: PolicyInput) -> Decision: ...


class Fits(Protocol):
    """Whether a plan can run on an availability, both given by number."""

    def __call__(self, plan: int, state: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunSegment:
    """A span of time in one activity and on one plan, for plots."""

    start_s: float
    end_s: float
    kind: JobActivity
    plan: int | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a policy achieved on a trace."""

    policy: str
    duration_s: float
    samples: float
    steps: float
    steps_lost: float
    """Iterations that were finished and then rolled back."""
    reconfigurations: int
    """Including those after losses."""
    losses: int
    """Number of losses that stopped the running plan."""
    useful_s: float
    lost_s: float
    """Time spent on iterations that were rolled back or never finished."""
    downtime_s: float
    """Time spent on reconfigurations, restarts and checkpoints."""
    idle_s: float
    """Time without a plan to run."""
    gpu_seconds: tuple[float, ...]
    """GPU-seconds held, by pool."""
    usd: float | None
    segments: tuple[RunSegment, ...]
    ended: Ending = "trace"
    """Why the job ended: with the trace, after its last step, or when its budget was spent."""

    @property
    def goodput_samples_per_s(self) -> float:
        return self.samples / self.duration_s


NO_LIMITS = RunLimits()


def total_usd(
    plans: Sequence[PlanFigures], held_s: dict[int, float], ran_s: dict[int, float]
) -> float | None:
    """Dollars for GPUs while they were held, and for egress while the plans trained."""
    total = 0.0
    for plan, seconds in held_s.items():
        price = plans[plan].usd_per_s
        if price is None:
            return None
        ran = ran_s.get(plan, 0.0)
        total += price * seconds + plans[plan].egress_usd * ran / plans[plan].iteration_s
    return total
