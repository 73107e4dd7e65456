"""One job on one trace under every policy, with the bounds that no policy can pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.problem.question import Question
from planner.replay.oracle import ORACLE, foresee, ideal_samples
from planner.replay.plan_library import Search, TracePlans, plans_for, spells_of
from planner.replay.policies import IgnoreAdditions, Restart, Sailor
from simulator.traces.player import (
    AvailabilitySpan,
    PlanFigures,
    Policy,
    PolicyResult,
    ReconfigurationCosts,
    play,
)
from simulator.traces.trace import LostSlots, Trace

POLICIES = ("sailor", "restart", "ignore-additions", ORACLE)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What came of a trace."""

    trace: Trace
    plans: TracePlans
    ways: tuple[PlanFigures, ...]
    spells: tuple[AvailabilitySpan, ...]
    tales: tuple[PolicyResult, ...]
    """In the order of ``POLICIES``."""
    ideal_samples: float
    """If the best plan of each moment ran, and changes cost nothing."""


def replayed(
    question: Question,
    trace: Trace,
    costs: ReconfigurationCosts,
    *,
    taken: Sequence[LostSlots],
    search: Search,
    searches: int,
) -> Replay:
    """Play a trace under all policies, on the same plans and with the same machines lost."""
    plans = plans_for(question, trace, taken, search, searches=searches)
    ways = plans.ways()
    spells = spells_of(trace, plans, taken)
    policies: tuple[Policy, ...] = (
        Sailor(plans, ways, costs),
        Restart(plans),
        IgnoreAdditions(plans, trace.never_regained(taken)),
    )
    tales = [play(spells, ways, plans.fits, policy, costs) for policy in policies]
    tales.append(foresee(spells, ways, plans.fits, costs))
    assert tuple(tale.policy for tale in tales) == POLICIES
    return Replay(trace, plans, ways, spells, tuple(tales), ideal_samples(spells, ways, plans.fits))
