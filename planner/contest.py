"""All planners on one question: each one's first plan that fits, judged by one simulator.

A planner's own estimate ranks its plans and is never reported as a result. Its list is walked
from the best on; what the common form cannot say, what breaks a rule of the job or the cluster,
and what the common memory model finds too large is counted, and the first plan left is judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.case import Case, Mode, Planner
from simulator.estimate import Estimate
from simulator.memory import MemoryModel
from simulator.plan import Plan
from simulator.plan_check import check_plan
from simulator.plan_file import complete_plan
from simulator.request import Estimator


@dataclass(frozen=True, slots=True)
class Entry:
    """What one planner achieved."""

    planner: str
    plan: Plan | None
    estimate: Estimate | None
    own_seconds: float | None
    """The planner's own estimate of the plan, where it has one."""
    inexpressible: int = 0
    unlawful: int = 0
    """Plans that the job or the cluster does not allow."""
    too_large: int = 0
    why_not: str = ""
    """Why there is no plan at all, as the planner said it last."""

    @property
    def own_error(self) -> float | None:
        """How far the planner's own estimate is from the simulator's."""
        if self.estimate is None or self.own_seconds is None:
            return None
        return self.own_seconds / self.estimate.iteration_s - 1


def enter(planner: Planner, case: Case, mode: Mode, judge: Estimator) -> Entry:
    """Let one planner answer, and judge its first plan that can run."""
    inexpressible = unlawful = too_large = 0
    why_not = "it proposed nothing"
    for proposal in planner.proposals(case, mode):
        if proposal.plan is None:
            inexpressible += 1
            why_not = proposal.why_not
            continue
        plan = complete_plan(proposal.plan, case.cluster)
        faults = check_plan(plan, case.job, case.cluster)
        if faults:
            unlawful += 1
            why_not = str(faults[0])
            continue
        devices = MemoryModel(plan, case.costs, case.sites.capacity_bytes).pipelines()
        if not all(device.fits for row in devices for device in row):
            too_large += 1
            why_not = "no plan of it fits the devices' memory"
            continue
        own = proposal.seconds if math.isfinite(proposal.seconds) else None
        return Entry(
            planner.name,
            plan,
            judge.estimate(plan),
            own,
            inexpressible,
            unlawful,
            too_large,
        )
    return Entry(planner.name, None, None, None, inexpressible, unlawful, too_large, why_not)
