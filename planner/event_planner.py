"""Plans under the event estimator: runs the search, bounds the result, explains it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from planner.either_zero import better_zero
from planner.explain.reasons import explain_event
from planner.formula_planner import formula_search
from planner.outer_answer import better_with_outer_steps
from planner.pipelines.pipeline_mix import PipelineMix, mix_of_plan, mix_of_shape
from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.bounds import ROUNDING, Bounds
from planner.problem.contracts import with_less_spot
from planner.problem.inventory import Lot, grants_of, lots_of
from planner.problem.job_options import micro_batch_sizes, token_sharing_degrees, tp_degrees
from planner.problem.objective import Limits
from planner.problem.preference import error_between, objective_of, preferred, simpler_by
from planner.problem.question import (
    DEFAULT_BUDGETS,
    OFFLOAD_OR_NOT,
    OUTER_OR_NOT,
    RECOMPUTING,
    SEARCHED,
    STOPPED,
    Answer,
    AnswerReasons,
    BestByEstimate,
    Gain,
    Question,
    Rejected,
    Tried,
    outside_of,
)
from planner.search.bound import GAP_WORK_MAX, QUICK_WORK_MAX, TRIPS_TIMES, WORK_MAX, EventBound
from planner.search.chunks import best_in_chunks
from planner.search.local_search import EventSearch, JudgedPlan
from planner.search.offload import best_with_offload
from planner.search.search_cache import SearchCache
from planner.search.simpler import simpler_or_cheaper
from planner.search.size_variants import best_with_own_sizes
from planner.search.stage_limits import StageTimeTables
from planner.search.zero_bubble import best_without_bubble
from simulator.cluster.cluster import Cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Goal
from simulator.spec.plan import Plan

FORMULA_PLACES_MAX = 6
"""With more (zone, GPU kind) pairs than this, no starting plans come from the paper's formula."""
FORMULA_PLANS_MAX = 8
"""Starting plans taken from the search under the paper's formula."""
RELAXED_PLANS_MAX = 3
"""Most plans from a search with relaxed limits from which the search within limits starts anew."""
GAP_TIMES = 10
"""Factor on the budget if the gap that was asked for is not reached within it."""
SMALL_BUDGET = 400
"""Plans judged by default on up to 64 GPUs."""
NO_BOUNDS = Bounds(0.0, 0.0)
VARIANTS: Mapping[Tried, Callable[[EventSearch], JudgedPlan | None]] = {
    "zero-bubble": best_without_bubble,
    "offload": best_with_offload,
}
"""Functions that judge variants of a search's plans, by what the variants have."""

_T = TypeVar("_T")


def plan_by_events(
    question: Question, lots: tuple[Lot, ...], limits: Limits, cache: SearchCache
) -> Answer:
    """Find the best plan under the event estimator."""
    if question.space == "paper":
        raise InputError(
            Problem(
                "--space",
                '"paper" is a space of the paper estimator only',
                "use --estimator paper, or --space full",
            )
        )
    if "outer-steps" in question.tries:

        def ask(each: Question, known: SearchCache) -> Answer:
            return plan_by_events(each, lots, limits, known)

        return better_with_outer_steps(question, ask, cache)
    if "zero1" in question.tries:
        return better_zero(question, lambda each, known: _answer(each, lots, limits, known), cache)
    return _answer(question, lots, limits, cache)


def _answer(
    question: Question, lots: tuple[Lot, ...], limits: Limits, cache: SearchCache
) -> Answer:
    asked = _Asked(question, lots, limits, cache)
    try:
        asked.find()
    except KeyboardInterrupt:
        if not question.is_stoppable or not asked.take_best_so_far():
            raise
    return asked.answer()


@dataclass(slots=True, eq=False)
class _Asked:
    """The state of answering one question; after each step ``answer`` is consistent."""

    question: Question
    lots: tuple[Lot, ...]
    limits: Limits
    cache: SearchCache
    searches: list[EventSearch] = field(default_factory=list)
    search: EventSearch | None = None
    """The search that found the best plan."""
    best: JudgedPlan | None = None
    taken: JudgedPlan | None = None
    bounds: Bounds = NO_BOUNDS
    note: str = ""
    rejected: tuple[Rejected, ...] = ()
    why: AnswerReasons = field(default_factory=AnswerReasons)
    gains: dict[Tried, Gain] = field(default_factory=dict)

    def find(self) -> None:
        """Search, bound the result, and look for a simpler or cheaper plan."""
        question = self.question
        if not self._search_or_relax().is_complete:
            self._try_less_spot()
        if self.best is None:
            self.best = self.taken = self._find_best_of_allowed()
        if self.best is None:
            return
        self._bound(WORK_MAX)
        if question.gap is not None and self.note and outside_of(self.best.plan) is None:
            # Search again with a larger budget: the plan may get better, and the bound higher.
            self._search(self.limits, (self.best.plan,), GAP_TIMES)
            self._bound(GAP_WORK_MAX)
        if question.prefer == "simple":
            assert self.search is not None
            self.taken = simpler_or_cheaper(self.search, self.best)
        self._try_allowed()
        self._explain()

    def _search_or_relax(self, cluster: Cluster | None = None) -> EventSearch:
        """Search within the job's limits; if no plan keeps them, from plans of easier questions."""
        search = self._search(self.limits, cluster=cluster)
        if search.judged or search.is_complete:
            return search
        for easier in self.limits.relaxed():
            keeping = _rank_plans(self._search(easier, cluster=cluster).keeping(self.limits))
            if keeping:
                plans = tuple(judged.plan for judged in keeping[:RELAXED_PLANS_MAX])
                search = self._search(self.limits, plans, cluster=cluster)
        return search

    def _try_less_spot(self) -> None:
        """Search on parts of the spot GPUs, too, since no search aims at ``max_spot_share``."""
        whole = self.search
        assert whole is not None
        for cluster in with_less_spot(self.question.cluster, self.limits.objective.max_spot_share):
            found = min(self._search_or_relax(cluster).judged, key=_score, default=None)
            best = None if found is None else _judge_again(whole, found.plan)
            if best is not None and (self.best is None or best.score < self.best.score):
                self.best = self.taken = best

    def _find_best_of_allowed(self) -> JudgedPlan | None:
        """The best plan that has what is allowed beyond the searched space."""
        assert self.search is not None
        job = self.question.job
        searches, found = [self.search], []
        degrees = token_sharing_degrees(job)
        if "sequence" in job.objective.allow and max(degrees) > 1:
            search, _ = self._run_search(self.limits, shares_tokens=True, degrees=degrees)
            searches.append(search)
            found += search.judged
        if "micro-batch-per-pipeline" in job.objective.allow:
            found += [one for each in searches if (one := best_with_own_sizes(each)) is not None]
        if "interleaved" in job.objective.allow:
            found += [one for each in searches if (one := best_in_chunks(each)) is not None]
        outside = [one for one in found if outside_of(one.plan) is not None]
        return min(outside, key=lambda one: one.score, default=None)

    def _try_allowed(self) -> None:
        """Take a plan that has what is allowed if it is better; if simple plans are preferred, not
        if tied.
        """
        assert self.taken is not None
        if self.best is None or outside_of(self.best.plan) is not None:
            return  # The best plan has it already, since no plan of the space keeps the limits.
        found = self._find_best_of_allowed()
        if found is None or found.score >= self.best.score:
            return
        self.best = found
        gap = self.question.gap
        if gap is not None and self.bounds.objective >= found.score[0] * (1 - gap - ROUNDING):
            self.note = ""
        if self.question.prefer == "simple":
            found = preferred(found, [self.taken], self.limits.objective.goal)
        self.taken = found

    def take_best_so_far(self) -> bool:
        """Take the best plan of all searches after an interruption; false if there is none."""
        found = [(judged, one) for one in self.searches for judged in one.keeping(self.limits)]
        if not found:
            return False
        best, search = min(found, key=lambda pair: pair[0].score)
        if search.lots != self.lots:
            # The plan was found on a part of the spot GPUs; bounds and reasons are those of all.
            search = self.searches[0]
            best = _judge_again(search, best.plan) or best
        if self.best is None or best.score < self.best.score:
            self.best = best
            if not search.shares_tokens:
                self.search = search
        self.taken, self.note = self.best, STOPPED
        with contextlib.suppress(KeyboardInterrupt):
            if not self.bounds.objective and self.question.is_bounded:
                self.bounds = self._event_bound(0.0).bounds(*_figures(self.best))
            if search.limits is self.limits:
                self._explain()
        return True

    def answer(self) -> Answer:
        """The answer so far."""
        goal, best, taken = self.question.job.objective.goal, self.best, self.taken
        evaluations = sum(one.evaluations for one in self.searches)
        if best is None or taken is None or self.search is None:
            return Answer(None, None, evaluations, 0.0, 0.0, goal)
        has = "offload" if taken.plan.offloads else taken.plan.schedule
        return Answer(
            taken.plan,
            taken.estimate,
            evaluations,
            self.bounds.objective,
            self.bounds.seconds,
            goal,
            rejected=self.rejected,
            why=self.why,
            note=self.note,
            instead_of=_instead_of(best, taken, goal),
            covered=self._describe_covered(),
            gains=tuple(replace(gain, is_taken=gain.name == has) for gain in self.gains.values()),
        )

    def _describe_covered(self) -> str:
        """Which plans the bounds cover."""
        assert self.search is not None
        is_all = self.search.is_complete and not self._covers_more
        kind = "all judged" if is_all else "full"
        space = SEARCHED["event", "zero-bubble" if self._divides else kind]
        if self.question.job.recompute == "auto":
            space = f"{space}, {RECOMPUTING}"
        if self._offloads:
            space = f"{space}, {OFFLOAD_OR_NOT}"
        if self.question.outer_every is not None:
            space = f"{space}, {OUTER_OR_NOT}"
        return space

    @property
    def _divides(self) -> bool:
        """Whether plans may have divided backwards."""
        return "zero-bubble" in self.question.tries

    @property
    def _offloads(self) -> bool:
        """Whether plans may offload activations."""
        return "offload" in self.question.tries

    @property
    def _covers_more(self) -> bool:
        """Whether the bounds cover more than the search judges when it judges all."""
        return self._divides or self._offloads or self.question.outer_every is not None

    def _add_gain(self, name: Tried, found: JudgedPlan | None, without: JudgedPlan | None) -> None:
        """Note the best plans with and without what ``name`` names, over all searches."""
        goal = self.question.job.objective.goal
        known = self.gains.get(name, Gain(name, goal, None, None))

        def least(before: float | None, one: JudgedPlan | None) -> float | None:
            figures = [before] if one is None else [before, one.score[0]]
            return min((each for each in figures if each is not None), default=None)

        self.gains[name] = Gain(name, goal, least(known.best, found), least(known.without, without))

    def _search(
        self,
        within: Limits,
        given: tuple[Plan, ...] = (),
        times: int = 1,
        *,
        cluster: Cluster | None = None,
    ) -> EventSearch:
        """Search within some limits, or on another cluster; else keep the best plan found."""
        search, best = self._run_search(within, given, times, cluster=cluster)
        if within is self.limits and cluster is None:
            self.search, self.best, self.taken = search, best, best
        return search

    def _run_search(
        self,
        within: Limits,
        given: tuple[Plan, ...] = (),
        times: int = 1,
        *,
        shares_tokens: bool = False,
        degrees: tuple[int, ...] | None = None,
        cluster: Cluster | None = None,
    ) -> tuple[EventSearch, JudgedPlan | None]:
        """Return a search that has ended, and its best plan.

        One of plans with sequence parallelism or outer steps ends with its budget, since its bounds
        are not valid.
        """
        question, lots, job = self.question, self.lots, self.question.job
        if cluster is not None:
            question = replace(question, cluster=cluster)
            lots = lots_of(cluster, PlaceFacts(cluster, question.measurements.network))
        judge, maker = self.cache.event(question, lots, shares_tokens=shares_tokens)
        usual = default_budget(lots)
        budget = times * (question.budget or usual)
        search = EventSearch(
            job,
            lots,
            grants_of(question.cluster, lots),
            maker,
            judge,
            within,
            micro_batch_sizes(job),
            degrees or tp_degrees(job),
            budget,
            _formula_plans(question, lots, within, maker),
            (*given, *self.cache.given),
            question.proves and not shares_tokens and question.outer_every is None,
            width=max(1.0, budget / usual),
            told=self._tell_with_best(lambda judged: f"{judged} of about {budget} plans judged"),
            shares_tokens=shares_tokens,
            outer_every=question.outer_every,
        )
        self.searches.append(search)
        plain = best = search.run()
        for name in question.tries if not shares_tokens else ():
            found = VARIANTS[name](search)
            if within is self.limits:
                self._add_gain(name, found, plain)
            if found is not None and (best is None or found.score < best.score):
                best = found
        # The cost frontier reads these: a plan that keeps only the relaxed limits is left out.
        self.cache.judged += [(each.plan, each.estimate) for each in search.keeping(self.limits)]
        return search, best

    def _bound(self, work_max: float) -> None:
        """Bound the searched space, exactly if all plans were judged; note why a gap was missed."""
        question, search, best = self.question, self.search, self.best
        if not question.is_bounded:
            return
        assert search is not None
        assert best is not None
        bound = self._event_bound(work_max)
        bounds = bound.bounds(*_figures(best))
        if search.is_complete and not self._covers_more:
            seconds = bounds.seconds if self.limits.goal_is_cost else best.score[0]
            bounds = Bounds(seconds, best.score[0])
        # Both bounds hold, and an interruption may have ended the second one early.
        self.bounds = Bounds(
            max(bounds.seconds, self.bounds.seconds), max(bounds.objective, self.bounds.objective)
        )
        self.note = ""
        if bound.is_stopped:
            raise KeyboardInterrupt
        gap = question.gap
        if gap is None or self.bounds.objective >= best.score[0] * (1 - gap - ROUNDING):
            return
        if bound.work >= bound.work_max:
            why = "the bound has no time left"
        else:
            why = "the bound cannot be raised; a better plan may or may not exist"
        self.note = f"a gap of {gap:.3g} was not reached: {why}"

    def _event_bound(self, work_max: float) -> EventBound:
        assert self.search is not None
        search, question = self.search, self.question
        tables = search.tables
        if self._covers_more:
            tables = StageTimeTables(
                search.maker.for_bound(offloads=self._offloads),
                search.lots,
                degrees=search.degrees,
                recompute=search.job.recompute,
                per_layer_sync=search.judge.overlaps,
                divides=self._divides,
                takes_outer_steps=question.outer_every is not None,
            )
        return EventBound(
            tables,
            search.lots,
            search.grants,
            self.limits,
            search.job.global_batch,
            search.micro_batches,
            work_max=work_max if question.proves else min(work_max, QUICK_WORK_MAX),
            trips_max=TRIPS_TIMES * work_max if question.proves else 0.0,
            gap=question.gap or 0.0,
            told=self._tell_with_best(
                lambda share: f"bound: {min(share, 1.0):.0%} of its work at most"
            ),
        )

    def _tell_with_best(self, text: Callable[[_T], str]) -> Callable[[_T], None]:
        """Return a progress callback that adds the best plan so far."""
        told = self.question.told
        if told is None:
            return lambda _: None

        def tell(how_far: _T) -> None:
            best = self.best
            unit = "$" if self.limits.goal_is_cost else "s"
            known = "" if best is None else f", best plan {best.score[0]:.4g} {unit}"
            told(f"{text(how_far)}{known}")

        return tell

    def _explain(self) -> None:
        assert self.search is not None
        assert self.taken is not None
        self.rejected, self.why = explain_event(self.search, self.taken)


def _figures(best: JudgedPlan) -> tuple[float, float]:
    """Seconds and objective of a plan that keeps all limits."""
    return best.estimate.iteration_s, best.score[0]


def _rank_plans(judged: list[JudgedPlan]) -> list[JudgedPlan]:
    return sorted(judged, key=_score)


def _judge_again(search: EventSearch, plan: Plan) -> JudgedPlan | None:
    """A plan of another search, judged by this one."""
    mix = mix_of_plan(plan, search.maker)
    return None if mix is None else search.judge_plan(plan, mix)


def _score(judged: JudgedPlan) -> tuple[float, ...]:
    return judged.score


def _instead_of(best: JudgedPlan, taken: JudgedPlan, goal: Goal) -> BestByEstimate | None:
    """How the plan that was taken compares with the best by its estimate, if it is another."""
    if taken is best:
        return None
    usd, least = best.estimate.money.total_usd, objective_of(best, goal)
    spends = taken.estimate.money.total_usd
    return BestByEstimate(
        goal,
        best.estimate.iteration_s,
        usd,
        loses=objective_of(taken, goal) / least - 1 if least > 0 else 0.0,
        error=error_between(best, taken),
        saves=1 - spends / usd if usd and spends is not None else None,
        simpler=simpler_by(taken.plan, best.plan),
    )


def default_budget(lots: tuple[Lot, ...]) -> int:
    """Plans to judge: more on few GPUs, where judging a plan takes less time."""
    gpus = sum(lot.gpus for lot in lots)
    return max(DEFAULT_BUDGETS["event"], min(SMALL_BUDGET, SMALL_BUDGET * 64 // gpus))


def _formula_plans(
    question: Question, lots: tuple[Lot, ...], limits: Limits, maker: TemplateMaker
) -> tuple[PipelineMix, ...]:
    """Starting plans that are good under the formula; none unless all links are measured."""
    job, measured = question.job, question.measurements.network.raw_between
    ends = {(lot.zone, lot.gpu) for lot in lots}
    known = all((one, other) in measured for one in ends for other in ends)
    if job.recompute == "full" or not known or len(ends) > FORMULA_PLACES_MAX:
        return ()
    profile = question.measurements.profile_of(job, catalogue=question.cluster.catalogue)
    if (
        profile is None
        or 1 not in profile.sizes
        or not any(gpu in profile.gpus() for _, gpu in ends)
    ):
        return ()
    search = formula_search(question, lots, limits, profile)
    found = search.search()
    best = search.improver.best
    chosen = ([best] if best is not None else []) + list(found[:FORMULA_PLANS_MAX])
    return tuple(dict.fromkeys(mix_of_shape(one.shape, maker) for one in chosen))
