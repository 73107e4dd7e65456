"""A cache for several searches of one job: layer costs, templates, estimates of plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import Lot
from planner.problem.question import Question
from simulator.api import estimator
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.result import Estimate
from simulator.spec.job import RecomputePolicy
from simulator.spec.plan import Plan


class CachedEstimator(EventEstimator):
    """An event estimator that judges each plan once."""

    def __init__(self, judge: EventEstimator) -> None:
        super().__init__(judge.costs, judge.network, judge.facts)
        self._known: dict[Plan, Estimate] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """The estimate of a plan, computed on first use."""
        if plan not in self._known:
            self._known[plan] = super().estimate(plan)
        return self._known[plan]


@dataclass(slots=True, eq=False)
class SearchCache:
    """Shared by several searches; the job's objective and limits may differ between them."""

    judged: list[tuple[Plan, Estimate]] = field(default_factory=list)
    """Judged plans that keep the limits of their question."""
    given: tuple[Plan, ...] = ()
    """Plans from which searches start."""
    _judges: dict[tuple[tuple[Lot, ...], RecomputePolicy], EventEstimator] = field(
        default_factory=dict
    )
    _makers: dict[tuple[tuple[Lot, ...], RecomputePolicy, bool], TemplateMaker] = field(
        default_factory=dict
    )

    def event(
        self, question: Question, lots: tuple[Lot, ...], *, shares_tokens: bool = False
    ) -> tuple[EventEstimator, TemplateMaker]:
        """The event estimator, and a template maker for these lots.

        ``shares_tokens``: the templates are of plans with sequence parallelism. A cache serves
        questions with outer steps, or questions without.
        """
        key = (lots, question.job.recompute)
        if key not in self._judges:
            made = estimator(
                question.estimator,
                job=question.job,
                cluster=question.cluster,
                measurements=question.measurements,
            )
            assert isinstance(made, EventEstimator)
            self._judges[key] = CachedEstimator(made)
        judge, of_kind = self._judges[key], (*key, shares_tokens)
        if of_kind not in self._makers:
            costs = judge.costs_if(shares_tokens=shares_tokens)
            takes_outer_steps = question.outer_every is not None
            self._makers[of_kind] = TemplateMaker(
                costs, judge.network, judge.facts, lots, takes_outer_steps=takes_outer_steps
            )
        return judge, self._makers[of_kind]
