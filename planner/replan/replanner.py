"""Finds the next plan after nodes were lost or added, in milliseconds.

Unbroken pipelines stay where they are and take over the micro batches; the remaining GPUs of
broken pipelines, and new nodes, form pipelines again where that helps. A few such plans are
placed on the nodes and judged, always including the simplest: drop the broken pipelines.
``improve`` searches further, from the running plan and from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.api import plan_job
from planner.problem.preference import are_tied, objective_of, preferred
from planner.problem.question import Question
from planner.replan.damage import RunningPlan
from planner.replan.move_cost import MoveCost, cost_of_move
from planner.replan.nodes import PlannerNode, cluster_with, nodes_used
from planner.replan.replan_search import PlacedPlan, ReplanSearch, by_worth
from planner.replan.replan_tables import ReplanTables
from planner.replan.transfers import Transfers, transfers_of
from simulator.documents.problems import Problem
from simulator.estimate.result import Estimate
from simulator.spec.plan import Place, Plan

REPLAN_BUDGET = 3
"""Plans placed and judged right after a change; each takes milliseconds on 512 GPUs."""
FORESEE_BUDGET = 8
"""Plans judged for each loss whose answer is computed ahead of time."""
IMPROVE_BUDGET = 60
"""Plans judged by ``improve``."""


@dataclass(frozen=True, slots=True, eq=False)
class Replan:
    """The next plan, the transfers and cost of moving to it, or why there is none."""

    plan: Plan | None
    estimate: Estimate | None
    transfers: Transfers | None
    move: MoveCost | None
    needed: str | None
    """Why the running plan cannot go on, if it cannot."""
    evaluations: int
    problems: tuple[Problem, ...] = ()
    nodes: frozenset[str] = frozenset()
    """Ids of the nodes that the plan uses."""
    with_idle: PlacedPlan | None = None
    """If the job stays: the best plan found on nodes that are idle now."""

    @property
    def found(self) -> tuple[Plan, Estimate, Transfers, MoveCost]:
        """Plan, estimate, transfers and cost, where there is a plan."""
        assert self.plan is not None
        assert self.estimate is not None
        assert self.transfers is not None
        assert self.move is not None
        return self.plan, self.estimate, self.transfers, self.move


def _take_better(one: PlacedPlan | None, other: PlacedPlan | None) -> PlacedPlan | None:
    return min((plan for plan in (one, other) if plan is not None), key=by_worth, default=None)


@dataclass(eq=False)
class Replanner(ReplanTables):
    """Replans one job; make another one when prices or links change."""

    def replan(
        self,
        running: RunningPlan,
        nodes: Sequence[PlannerNode],
        *,
        leaving: Sequence[PlannerNode] = (),
        budget: int = REPLAN_BUDGET,
    ) -> Replan:
        """The best of a few plans on these nodes, at least as good as dropping broken pipelines.

        ``leaving``: further nodes of the running plan, which train until it has stopped.
        """
        search = ReplanSearch(self, running, tuple(nodes), budget, tuple(leaving))
        found = search.first()
        if found is None:
            return self.improve(running, nodes, budget=budget)
        return self._result(running, found, search)

    def replan_as(
        self, running: RunningPlan, nodes: Sequence[PlannerNode], plan: Plan
    ) -> Replan | None:
        """The better of the given plan and the survivors on these nodes; ``None``: neither fits."""
        search = ReplanSearch(self, running, tuple(nodes), 2)
        simple = search.survivors()
        best = _take_better(search.placed_anew(plan), simple)
        return self._result(running, best, search) if best is not None else None

    def improve(
        self, running: RunningPlan, nodes: Sequence[PlannerNode], *, budget: int = IMPROVE_BUDGET
    ) -> Replan:
        """Search from the running plan and from scratch, when there is time."""
        search = ReplanSearch(self, running, tuple(nodes), budget)
        best = search.first()
        while best is not None and search.evaluations < budget:
            better = search.around(best)
            if better is None:
                break
            best = better
        # The job may run on a node of unknown price; a search from scratch needs prices.
        if self.limits.needs_prices:
            usd_per_hour = self.judge.facts.usd_per_hour
            nodes = [n for n in nodes if usd_per_hour(Place(*n.key), 1, n.spot) is not None]
        cluster = cluster_with(self.cluster, nodes)
        problems: tuple[Problem, ...] = ()
        if nodes:
            answer = plan_job(
                Question(
                    self.job,
                    cluster,
                    self.measurements,
                    seconds_left=self.seconds_left,
                    prefer=self.job.objective.prefer,
                    is_bounded=False,
                )
            )
            problems = answer.problems
            if answer.plan is not None:
                best = self._choose_preferred(
                    running, best, search.placed_anew(answer.plan), search
                )
        if best is None:
            problems = problems or (search.why_none(),)
            return Replan(None, None, None, None, search.needed, search.evaluations, problems)
        found = self._result(running, best, search)
        if best.plan != running.plan:
            return found
        return replace(found, with_idle=search.best_with_idle_nodes())

    def _choose_preferred(
        self,
        running: RunningPlan,
        near: PlacedPlan | None,
        anew: PlacedPlan | None,
        search: ReplanSearch,
    ) -> PlacedPlan | None:
        """The better plan, or the one that the job prefers if both are tied.

        The latter only if it beats the running plan beyond the error bar, or that cannot go on.
        """
        better, objective = _take_better(near, anew), self.job.objective
        if better is None or objective.prefer == "fastest":
            return better
        others = [one for one in (near, anew) if one is not None]
        taken = preferred(better, others, objective.goal)
        now = objective_of(running, objective.goal)
        is_worth_it = objective_of(taken, objective.goal) < now and not are_tied(
            running, taken, objective.goal
        )
        return taken if search.needed is not None or is_worth_it else better

    def _result(self, running: RunningPlan, best: PlacedPlan, search: ReplanSearch) -> Replan:
        nodes = (*search.nodes, *search.leaving)
        transfers = transfers_of(
            best.plan, nodes, running=running.plan, state=self.state, routes=self.routes
        )
        move = cost_of_move(
            best.plan,
            transfers,
            nodes,
            state=self.state,
            network=self.judge.network,
            old_iteration_s=running.estimate.iteration_s,
            new_iteration_s=best.estimate.iteration_s,
            is_planned=not search.has_losses,
            usd_per_hour=best.estimate.rent_usd_per_hour,
            times=self.times,
        )
        return Replan(
            best.plan,
            best.estimate,
            transfers,
            move,
            search.needed,
            search.evaluations,
            nodes=nodes_used(best.plan),
        )
