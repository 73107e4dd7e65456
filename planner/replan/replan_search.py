"""Searches the next plan after a change: drafts mixes, places them on the nodes, judges them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.pipelines.own_sizes import plan_with_own_sizes
from planner.pipelines.pipeline_mix import PipelineMix, plan_of, rough_seconds
from planner.pipelines.pipeline_template import Template
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import Lot, grants_of, is_supplied, missing_price
from planner.problem.objective import Breach, LimitedFigures
from planner.replan.assign_nodes import assign, keeping_places
from planner.replan.damage import RunningPlan, damage, template_size
from planner.replan.nodes import (
    PlannerNode,
    lots_on,
    nodes_used,
    paid_first,
    spot_by_id,
    unplaced,
)
from planner.replan.repairs import RepairDrafts
from planner.replan.replan_tables import ReplanTables
from planner.replan.state_map import placed_groups
from planner.search.chunks import in_chunks, in_rounds
from simulator.documents.problems import Problem
from simulator.estimate.result import Estimate
from simulator.inputs.plan_check import share_samples, split_in_proportion
from simulator.spec.plan import Pipeline, Plan, with_sizes

ROUGH_OTHER_CUTS = 1.1
"""Factor on the rough time of a mix whose boundaries differ from those of the running pipelines."""
ROUGH_WORSE_MAX = 1.5
"""A mix whose rough time exceeds that of the survivors by this factor is not judged."""

WITH_IDLE_BUDGET = 4
"""Mixes judged to tell how much worse it is to use idle nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPlan:
    """A plan on nodes, with its estimate and score; a lower score is better."""

    score: tuple[float, ...]
    plan: Plan
    estimate: Estimate


@dataclass(eq=False)
class ReplanSearch:
    """The search for one question."""

    tables: ReplanTables
    running: RunningPlan
    nodes: tuple[PlannerNode, ...]
    budget: int
    leaving: tuple[PlannerNode, ...] = ()
    """Nodes of the running plan that no other may use, and that train until it has stopped."""
    evaluations: int = 0
    lots: tuple[Lot, ...] = field(init=False)
    needed: str | None = field(init=False, default=None)
    """Why the running plan cannot go on, if it cannot."""
    has_losses: bool = field(init=False)
    _seen: set[PipelineMix] = field(default_factory=set)
    _mix_by_plan_id: dict[int, PipelineMix] = field(default_factory=dict)
    _simple: Plan | None = None
    _judged_plans: list[PlacedPlan] = field(default_factory=list)
    _refused: list[Breach] = field(default_factory=list)
    """The limit that a plan exceeds most, for each plan that breaks limits."""

    def __post_init__(self) -> None:
        unknown = {n.key for n in self.nodes} - {x.key for x in self.tables.lots}
        assert not unknown, f"made for other pools than {sorted(unknown)}"
        self.lots = lots_on(self.tables.lots, self.nodes)
        self._damage = damage(self.running, self.nodes)
        self._grants = grants_of(self.tables.cluster, self.lots)
        self._spot = spot_by_id(self.nodes)
        b = template_size(self.running.plan, self.tables.job)
        self._total = self.tables.job.global_batch // b
        self._templates = self.tables.templates_of(self.running.plan)
        self._drafts = RepairDrafts(self._templates, self.lots, self._total, b)
        self._own_sizes = self._sizes_by_stages()
        if self.running.plan.virtual_stages > 1 or self._own_sizes:
            self.budget *= 2  # Mixes are judged with chunks, or sizes of their own, and without.
        self.has_losses = bool(damage(self.running, (*self.nodes, *self.leaving)).broken)
        if self._damage.broken:
            lost = len(self._damage.broken)
            self.needed = f"{lost} of {len(self.running.plan.pipelines)} pipelines lost devices"

    def first(self) -> PlacedPlan | None:
        """The best of the survivors and of a few mixes around them."""
        simple = self.survivors()
        found = [simple] if simple is not None else []
        found += self._judge_best(self._base())
        return min(found, key=by_worth, default=None)

    def around(self, best: PlacedPlan) -> PlacedPlan | None:
        """A better plan near this one, or ``None``."""
        mix = self._mix_by_plan_id.get(id(best.plan)) or self._base()
        found = min(self._judge_best(mix), key=by_worth, default=None)
        return found if found is not None and found.score < best.score else None

    def placed_anew(self, plan: Plan) -> PlacedPlan | None:
        """Judge a plan of another search: with running pipelines at their places, and by its own
        placement if that differs. If neither keeps the limits, judge it on the contracts at which
        the search priced it.
        """
        ways = [keeping_places(plan, self.running.plan, self.nodes)]
        if plan.together != self.running.together:
            ways.append(plan)
        found = [placed for placed in map(self.placed, ways) if placed is not None]
        if not found and len(set(self._spot.values())) > 1:
            orders = (paid_first(self.nodes, plan, spot=spot) for spot in (False, True))
            again = (self.placed(plan, nodes) for nodes in orders)
            return next((placed for placed in again if placed is not None), None)
        return min(found, key=by_worth, default=None)

    def placed(self, plan: Plan, nodes: Sequence[PlannerNode] | None = None) -> PlacedPlan | None:
        """Judge a plan on the nodes where it moves least.

        ``None``: it does not fit, breaks a limit there, or is the survivors' plan, judged before.
        """
        if not is_supplied(plan, self.lots, self._grants):
            return None
        on_nodes = assign(
            plan,
            self.nodes if nodes is None else nodes,
            running=self.running.plan,
            state=self.tables.state,
            routes=self.tables.routes,
        )
        if on_nodes is None or on_nodes == self._simple:
            return None
        return self._judge(on_nodes)

    def _judge(self, plan: Plan) -> PlacedPlan | None:
        self.evaluations += 1
        assert plan.samples_per_iteration == self.tables.job.global_batch
        estimate = (
            self.running.estimate
            if plan == self.running.plan
            else self.tables.judge.estimate_on(plan, self._spot)
        )
        if not estimate.fits:
            return None
        figures = LimitedFigures(
            estimate.iteration_s, estimate.money.total_usd, self._spot_share(plan)
        )
        score = self.tables.limits.score(figures)
        if score is None:
            breaches = list(self.tables.limits.breaches(figures))
            if breaches:  # Without a breach there is no score because its price is unknown.
                self._refused.append(max(breaches, key=lambda breach: breach.excess))
            return None
        self._judged_plans.append(PlacedPlan((*score, len(plan.pipelines)), plan, estimate))
        return self._judged_plans[-1]

    def best_with_idle_nodes(self) -> PlacedPlan | None:
        """The best judged plan that uses nodes which the running plan leaves idle.

        If none was judged, it judges a few mixes that looked too slow by rough times.
        """
        in_use, base = nodes_used(self.running.plan), self._base()
        if all(node.id in in_use for node in self.nodes):
            return None
        if (best := self._find_best_beyond(in_use)) is not None:
            return best
        drafted = dict.fromkeys(self._drafts.around(base, ()))
        more = [mix for mix in drafted if base.pipelines < mix.pipelines <= self._total]
        for mix in self._rank(more, base, worse_max=math.inf)[:WITH_IDLE_BUDGET]:
            if list(self._judge_mix(mix)) and (best := self._find_best_beyond(in_use)) is not None:
                return best
        return None

    def _find_best_beyond(self, in_use: frozenset[str]) -> PlacedPlan | None:
        others = (one for one in self._judged_plans if not nodes_used(one.plan) <= in_use)
        return min(others, key=by_worth, default=None)

    def why_none(self) -> Problem:
        """Why no plan was found on these nodes."""
        if not self.nodes:
            return Problem(
                "cluster", "no node is up that may be used", "wait for a node, or add one"
            )
        unpriced = missing_price(lot for lot in self.lots if lot.gpus)
        if unpriced is not None and self.tables.limits.needs_prices:
            return unpriced
        if not self._refused:
            what = "no plan that was judged fits on the nodes that are up"
            return Problem("cluster", what, "wait for another node, or add one")
        near = min(self._refused, key=lambda breach: breach.excess)
        unit = " s" if near.limit == "deadline" else ""
        return Problem(
            f"objective.{near.limit}",
            f"allows {near.allowed:.4g}{unit}, and the nearest plan on the nodes that are up has"
            f" {near.needed:.4g}{unit}",
            "relax it, or add nodes",
        )

    def _spot_share(self, plan: Plan) -> float:
        devices: Counter[bool] = Counter()
        for stages, place in placed_groups(plan):
            assert place.node is not None
            devices[self._spot[place.node]] += stages[0].tp
        return devices[True] / devices.total()

    def survivors(self) -> PlacedPlan | None:
        """The running plan without its broken pipelines."""
        plan, alive = self.running.plan, self._damage.alive
        if not alive or len(alive) > self._total:
            return None
        if len(alive) < len(plan.pipelines):
            kept = self._share_out_samples([plan.pipelines[p] for p in alive])
            if kept is None:
                return None
            plan = replace(plan, pipelines=kept)
            plan = with_sizes(plan, plan.size_by_pipeline)
        self._simple = plan
        found = self._judge(plan)
        if found is None and self.needed is None:
            self.needed = (
                "the running plan exceeds its devices' memory or breaks a limit of the job"
            )
        return found

    def _share_out_samples(self, kept: Sequence[Pipeline]) -> tuple[Pipeline, ...] | None:
        """The pipelines with the samples of those that were lost; ``None`` if that cannot be."""
        plan, counts = self.running.plan, [pipeline.micro_batches for pipeline in kept]
        if len(plan.sizes) == 1:
            shares = split_in_proportion(self._total, counts)
        else:
            sizes = [plan.size_of(pipeline) for pipeline in kept]
            found = share_samples(self.tables.job.global_batch, sizes, counts)
            if found is None or plan.virtual_stages > 1:
                return None
            shares = found
        pairs = zip(shares, kept, strict=True)
        more = tuple(replace(pipeline, micro_batches=n) for n, pipeline in pairs)
        return in_rounds(more, plan.virtual_stages) if plan.virtual_stages > 1 else more

    def _sizes_by_stages(self) -> dict[tuple[TemplateStage, ...], int]:
        """The micro batch sizes of running pipelines that have other ones than their templates."""
        plan, found = self.running.plan, {}
        for template, size in zip(self.running.templates, plan.size_by_pipeline, strict=True):
            if size != template.micro_batch:
                found[template.stages] = size
        return found

    def _base(self) -> PipelineMix:
        """The mix of surviving pipelines, possibly empty."""
        templates = Counter(self.running.templates[p] for p in self._damage.alive)
        return PipelineMix(tuple(templates), tuple(templates.values()), self.running.together)

    def _judge_best(self, base: PipelineMix) -> Iterable[PlacedPlan]:
        """Judge the most promising mixes around one, including the mix itself."""
        if self.evaluations >= self.budget:
            return
        drafted = dict.fromkeys([base, *self._drafts.around(base, self._damage.broken)])
        fresh = [f for f in drafted if f not in self._seen and 0 < f.pipelines <= self._total]
        for mix in self._rank(fresh, base):
            if self.evaluations >= self.budget:
                return
            self._seen.add(mix)
            yield from self._judge_mix(mix)

    def _judge_mix(self, mix: PipelineMix) -> Iterator[PlacedPlan]:
        """The judged plans of a mix."""
        for plan in filter(self._has_allowed_sizes, self._plans_of(mix)):
            # If the running plan has sequence parallelism, the templates assume it too.
            shares = self.running.plan.sequence_parallel
            found = self.placed(replace(plan, sequence_parallel=shares))
            if found is not None:
                self._mix_by_plan_id[id(found.plan)] = mix
                yield found

    def _rank(
        self,
        mixes: Sequence[PipelineMix],
        base: PipelineMix,
        worse_max: float = ROUGH_WORSE_MAX,
    ) -> list[PipelineMix]:
        """Most promising first: two mixes on the pools in use for one that uses others.

        Rough times compare well only between mixes on the same pools, so the two groups are ranked
        apart.
        """
        running = self.running.templates
        used = {stage.lot for template in running for stage in template.stages}
        cuts = {template.cuts for template in running}
        some = [*mixes, *([base] if base.templates else ())]
        if not some:
            return []
        seconds = rough_seconds(some, [self._total] * len(some)).tolist()
        roughly = list(map(self._templates.rough, some, seconds))
        most = worse_max * roughly.pop() if base.templates else math.inf
        now = dict(base.pairs)
        order: tuple[list[tuple[float, int, int, PipelineMix]], ...] = ([], [])
        for number, (mix, rough) in enumerate(zip(mixes, roughly, strict=True)):
            if rough > most:
                continue
            # Pipelines with equal boundaries synchronise with the fewest messages.
            is_odd = any(template.cuts not in cuts for template in mix.templates)
            score = rough * ROUGH_OTHER_CUTS if is_odd else rough
            counts = dict(mix.pairs)
            changes = sum(abs(counts.get(t, 0) - now.get(t, 0)) for t in {**counts, **now})
            strays = any(s.lot not in used for t in mix.templates for s in t.stages)
            order[strays].append((score, changes, number, mix))
        places = [
            (3 * place + 2 if strays else place + place // 2, mix)
            for strays, some in enumerate(order)
            for place, (*_, mix) in enumerate(sorted(some, key=lambda one: one[:3]))
        ]
        return [mix for _, mix in sorted(places, key=lambda pair: pair[0])]

    def _plans_of(self, mix: PipelineMix) -> Iterator[Plan]:
        """The plans of a mix: the plain one, and one with chunks or own sizes if the running plan
        has them.

        Pipelines that run already stay where they are.
        """
        running, maker = self.running.plan, self._templates.maker
        plain = plan_of(mix, self._total, maker)
        if running.virtual_stages == 1:
            if self._own_sizes:
                own = self._in_own_sizes(mix)
                if own is not None:
                    yield self._at_home(mix, own)
            yield self._at_home(mix, plain)
            return
        ours = {tuple(map(unplaced, pipeline.stages)) for pipeline in running.pipelines}
        ways = [p for p in in_chunks(plain) if p.virtual_stages == running.virtual_stages]
        if ways:
            # Take the way in which the most pipelines run already.
            best = max(ways, key=lambda way: sum(p.stages in ours for p in way.pipelines))
            yield keeping_places(best, running, self.nodes)
        yield plain

    def _has_allowed_sizes(self, plan: Plan) -> bool:
        """Whether the job allows the plan's micro batch sizes; it may not allow the templates'."""
        allowed = self.tables.job.micro_batches
        return not allowed or set(plan.sizes) <= set(allowed)

    def _in_own_sizes(self, mix: PipelineMix) -> Plan | None:
        """The plan of a mix whose pipelines have the sizes of running ones with their stages."""
        maker = self._templates.maker
        templates = tuple(
            template
            if (size := self._own_sizes.get(template.stages)) is None
            else maker.timed(template.stages, size, template.cuts)
            for template in mix.templates
        )
        if templates == mix.templates:
            return None
        resized = replace(mix, templates=templates)
        return plan_with_own_sizes(resized, self.tables.job.global_batch, maker)

    def _at_home(self, mix: PipelineMix, plan: Plan) -> Plan:
        """The plan with running pipelines where they are; ``mix`` gives the pipelines' order."""
        homes: defaultdict[Template, list[int]] = defaultdict(list)
        for p in self._damage.alive:
            homes[self.running.templates[p]].append(p)
        made = (template for template, n in mix.pairs for _ in range(n))
        pipelines = []
        for pipeline, template in zip(plan.pipelines, made, strict=True):
            here = homes.get(template)
            if here:
                running = self.running.plan.pipelines[here.pop(0)].stages
                # Another number of micro batches may recompute another number of layers.
                pairs = zip(pipeline.stages, running, strict=True)
                stages = tuple(replace(new, places=old.places) for new, old in pairs)
                pipelines.append(replace(pipeline, stages=stages))
            else:
                pipelines.append(pipeline)
        return replace(plan, pipelines=tuple(pipelines))


def by_worth(placed: PlacedPlan) -> tuple[float, ...]:
    """Sort key: the best plan first."""
    return placed.score
