"""From the running plan and a change to the next plan, in milliseconds.

Pipelines that lost nothing stay where they are; micro batches are dealt anew; what is left of
broken pipelines, and what came new, becomes pipelines again if that helps. A handful of such
plans is placed on the nodes and judged as it would run, among them always the simplest: drop
what is broken. ``improve`` searches on, from the running plan and from nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.api import plan_job, tp_degrees
from planner.pipelines.pipeline_mix import Fleet, plan_of, rough_seconds
from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.problem.inventory import Lot, grants_of, is_supplied, lots_of
from planner.problem.objective import Figures, Limits
from planner.problem.question import Question
from planner.replan.assign_nodes import assign, with_homes
from planner.replan.damage import Running, check_replannable, damage, template_of
from planner.replan.move_cost import (
    DEFAULT_TIMES,
    MoveCost,
    MoveTimes,
    cost_of_move,
    usd_per_hour_of,
)
from planner.replan.nodes import Node, cluster_with, is_placed, lots_on, nodes_used
from planner.replan.repairs import Drafts, template_lots
from planner.replan.state_map import State, placed_stages, state_of
from planner.replan.transfer_prices import Routes
from planner.replan.transfers import Transfers, transfers_of
from planner.search.local_search import EventSearch, micro_batch_sizes
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import Problem
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.result import Estimate
from simulator.inputs.plan_check import split_in_proportion
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan

REPLAN_BUDGET = 3
"""Plans that are placed and judged after a change; each takes milliseconds at 512 GPUs.

Before a change there is more time, and in the background more still.
"""
ROUGH_OTHER_CUTS = 1.1
"""What other boundaries than those of the other pipelines cost beyond rough times."""
ROUGH_WORSE_MAX = 1.5
"""Drafts that are so much worse than what survives by rough times are not judged."""
FORESEE_BUDGET = 8
IMPROVE_BUDGET = 60
UNPRICED_USD_PER_GPU_HOUR = 2.0
"""Stands for an unknown price where only the weight of a second against egress depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan on nodes, with its estimate and its worth; smaller is better."""

    worth: tuple[float, ...]
    plan: Plan
    estimate: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Replan:
    """The next plan and the way to it, or why there is none."""

    plan: Plan | None
    estimate: Estimate | None
    transfers: Transfers | None
    move: MoveCost | None
    needed: str | None
    """Why the running plan cannot go on, if it cannot."""
    evaluations: int
    problems: tuple[Problem, ...] = ()
    nodes: frozenset[str] = frozenset()
    """What the plan stands on."""

    @property
    def found(self) -> tuple[Plan, Estimate, Transfers, MoveCost]:
        """All of it, where there is a plan."""
        assert self.plan is not None
        assert self.estimate is not None
        assert self.transfers is not None
        assert self.move is not None
        return self.plan, self.estimate, self.transfers, self.move


@dataclass(eq=False)
class Replanner:
    """Replans one job; made once for the pools that there may be, since its tables take time.

    Prices, links and kinds of machines are the cluster's; which machines are up is said anew
    with every question. When prices or links change, another one is made.
    """

    job: Job
    cluster: Cluster
    measurements: Measurements
    seconds_left: float | None = None
    times: MoveTimes = DEFAULT_TIMES
    judge: EventEstimator = field(init=False)
    limits: Limits = field(init=False)
    lots: tuple[Lot, ...] = field(init=False)
    state: State = field(init=False)
    routes: Routes = field(init=False)
    _atlas: EventSearch = field(init=False)

    def __post_init__(self) -> None:
        judge = estimator(
            "event", job=self.job, cluster=self.cluster, measurements=self.measurements
        )
        assert isinstance(judge, EventEstimator)
        self.judge = judge
        self.limits = Limits(self.job.objective, self.job.steps, self.seconds_left)
        # Pools with nothing up at the moment count as one machine, so that they have a place.
        pools = tuple(replace(p, gpus=p.gpus or p.gpus_per_machine) for p in self.cluster.pools)
        self.lots = lots_of(replace(self.cluster, pools=pools), judge.sites)
        self.state = state_of(judge.costs)
        self._atlas = EventSearch(
            self.job,
            self.lots,
            (),
            TemplateMaker(judge.costs, judge.network, judge.sites, self.lots),
            judge,
            self.limits,
            micro_batch_sizes(self.job),
            tp_degrees(self.job),
            0,
        )
        hourly = sum(
            lot.gpus
            * (
                UNPRICED_USD_PER_GPU_HOUR
                if lot.price_usd_per_gpu_hour is None
                else lot.price_usd_per_gpu_hour
            )
            for lot in self.lots
        )
        self.routes = Routes(judge.network, hourly / 3600)

    # -- the running plan -----------------------------------------------------------------------

    def place(self, plan: Plan, nodes: Sequence[Node]) -> Plan | None:
        """Nodes and devices for a plan that does not run yet; none if it has no room there."""
        return assign(plan, nodes, running=None, state=self.state, routes=self.routes)

    def look_at(self, plan: Plan) -> Running:
        """Make ready for questions about a placed plan, before anything happens to it."""
        lot_of = {(lot.gpu, lot.machine, lot.zone): k for k, lot in enumerate(self.lots)}
        check_replannable(plan, lot_of)
        assert is_placed(plan), "place a plan before it is replanned"
        self._prepare(plan.micro_batch_size)
        maker, known = self._atlas.maker, dict[object, Template]()
        templates = []
        for pipeline in plan.pipelines:
            key = tuple(
                (s.layers, s.tp, s.recompute, s.place.gpu, s.place.machine, s.place.zone)
                for s in pipeline.stages
            )
            if key not in known:
                known[key] = template_of(pipeline, plan.micro_batch_size, maker, lot_of)
            templates.append(known[key])
        return Running(plan, self.judge.estimate(plan), tuple(templates))

    def _prepare(self, micro_batch: int) -> None:
        """Make the templates that may be asked for, so that no question waits for them."""
        total = self.job.global_batch // micro_batch
        for lots in template_lots(self.lots):
            self._atlas.templates(lots, micro_batch, total)

    # -- what comes next ------------------------------------------------------------------------

    def replan(
        self, running: Running, nodes: Sequence[Node], *, budget: int = REPLAN_BUDGET
    ) -> Replan:
        """The best of a few plans on these nodes, never worse than dropping what is broken."""
        search = _Search(self, running, tuple(nodes), budget)
        found = search.first()
        if found is None:
            return self.improve(running, nodes, budget=budget)
        return self._told(running, found, search)

    def replan_as(self, running: Running, nodes: Sequence[Node], plan: Plan) -> Replan | None:
        """The answer that is the given plan, placed on these nodes; none if it does not suit."""
        search = _Search(self, running, tuple(nodes), 2)
        simple = search.survivors()
        same = search.placed(with_homes(plan, running.plan, nodes))
        best = min((one for one in (same, simple) if one is not None), key=_worth, default=None)
        return self._told(running, best, search) if best is not None else None

    def improve(
        self, running: Running, nodes: Sequence[Node], *, budget: int = IMPROVE_BUDGET
    ) -> Replan:
        """Search from the running plan and from nothing; for when there is time."""
        search = _Search(self, running, tuple(nodes), budget)
        best = search.first()
        while best is not None and search.evaluations < budget:
            better = search.around(best)
            if better is None:
                break
            best = better
        cluster = cluster_with(self.cluster, nodes)
        problems: tuple[Problem, ...] = ()
        if nodes:
            answer = plan_job(
                Question(self.job, cluster, self.measurements, seconds_left=self.seconds_left)
            )
            problems = answer.problems
            if answer.plan is not None:
                anew = search.placed(with_homes(answer.plan, running.plan, nodes))
                best = min((one for one in (best, anew) if one is not None), key=_worth)
        if best is None:
            none_up = Problem("cluster", "no node is up", "wait for nodes, or add some")
            return Replan(
                None, None, None, None, search.needed, search.evaluations,
                problems or (none_up,),
            )  # fmt: skip
        return self._told(running, best, search)

    def _told(self, running: Running, best: Candidate, search: _Search) -> Replan:
        transfers = transfers_of(
            best.plan, search.nodes, running=running.plan, state=self.state, routes=self.routes
        )
        prices = {(lot.gpu, lot.machine, lot.zone): lot.price_usd_per_gpu_hour for lot in self.lots}
        move = cost_of_move(
            best.plan,
            transfers,
            search.nodes,
            state=self.state,
            network=self.judge.network,
            old_iteration_s=running.estimate.iteration_s,
            new_iteration_s=best.estimate.iteration_s,
            is_planned=not search.has_losses,
            usd_per_hour=usd_per_hour_of(best.plan, prices),
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


@dataclass(eq=False)
class _Search:
    """One question: what it shares between the plans that are judged."""

    by: Replanner
    running: Running
    nodes: tuple[Node, ...]
    budget: int
    evaluations: int = 0
    lots: tuple[Lot, ...] = field(init=False)
    needed: str | None = field(init=False, default=None)
    has_losses: bool = field(init=False)
    _seen: dict[Fleet, Candidate | None] = field(default_factory=dict)
    _fleet_of: dict[int, Fleet] = field(default_factory=dict)
    _simple: Plan | None = None

    def __post_init__(self) -> None:
        unknown = {n.key for n in self.nodes} - {(x.gpu, x.machine, x.zone) for x in self.by.lots}
        assert not unknown, f"made for other pools than {sorted(unknown)}"
        self.lots = lots_on(self.by.lots, self.nodes)
        self._damage = damage(self.running, self.nodes)
        self._grants = grants_of(self.by.cluster, self.lots)
        self._spot = {node.id for node in self.nodes if node.spot}
        b = self.running.plan.micro_batch_size
        self._total = self.by.job.global_batch // b
        self._drafts = Drafts(self.by._atlas, self.lots, self._total, b)
        self.has_losses = bool(self._damage.broken)
        if self.has_losses:
            lost = len(self._damage.broken)
            self.needed = f"{lost} of {len(self.running.plan.pipelines)} pipelines lost devices"

    def first(self) -> Candidate | None:
        """The best of what survives and of a few fleets around it."""
        simple = self.survivors()
        found = [simple] if simple is not None else []
        found += self._best_of(self._base())
        return min(found, key=_worth, default=None)

    def around(self, best: Candidate) -> Candidate | None:
        """Something better near a plan, or none."""
        fleet = self._fleet_of.get(id(best.plan)) or self._base()
        found = min(self._best_of(fleet), key=_worth, default=None)
        return found if found is not None and found.worth < best.worth else None

    def placed(self, plan: Plan) -> Candidate | None:
        """Judge a plan on the nodes where it moves least; none if it breaks a limit there."""
        if not is_supplied(plan, self.lots, self._grants):
            return None
        on_nodes = assign(
            plan,
            self.nodes,
            running=self.running.plan,
            state=self.by.state,
            routes=self.by.routes,
        )
        if on_nodes is None or on_nodes == self._simple:
            return None
        return self._judged(on_nodes)

    def _judged(self, plan: Plan) -> Candidate | None:
        self.evaluations += 1
        assert plan.samples_per_iteration == self.by.job.global_batch
        estimate = (
            self.running.estimate if plan == self.running.plan else self.by.judge.estimate(plan)
        )
        if not estimate.fits:
            return None
        figures = Figures(estimate.iteration_s, estimate.money.total_usd, self._spot_share(plan))
        worth = self.by.limits.worth(figures)
        if worth is None:
            return None
        return Candidate((*worth, len(plan.pipelines)), plan, estimate)

    def _spot_share(self, plan: Plan) -> float:
        devices: Counter[bool] = Counter()
        for stage, place in placed_stages(plan):
            devices[place.node in self._spot] += stage.tp
        return devices[True] / devices.total()

    def survivors(self) -> Candidate | None:
        """The running plan with the broken pipelines dropped and nothing else changed."""
        plan, alive = self.running.plan, self._damage.alive
        if not alive or len(alive) > self._total:
            return None
        kept = [plan.pipelines[p] for p in alive]
        if len(kept) < len(plan.pipelines):
            counts = split_in_proportion(self._total, [pipeline.micro_batches for pipeline in kept])
            kept = [Pipeline(n, p.stages) for n, p in zip(counts, kept, strict=True)]
            plan = replace(plan, pipelines=tuple(kept))
        self._simple = plan
        found = self._judged(plan)
        if found is None and self.needed is None:
            self.needed = "what runs does not fit its devices, or breaks a limit of the job"
        return found

    def _base(self) -> Fleet:
        """What survives, which may be nothing."""
        templates = Counter(self.running.templates[p] for p in self._damage.alive)
        return Fleet(tuple(templates), tuple(templates.values()))

    def _best_of(self, base: Fleet) -> Iterable[Candidate]:
        """Judge the fleets around one that promise most, the fleet itself among them."""
        if self.evaluations >= self.budget:
            return
        drafted = dict.fromkeys([base, *self._drafts.around(base, self._damage.broken)])
        drafted.pop(Fleet((), ()), None)
        fresh = [f for f in drafted if f not in self._seen and f.pipelines <= self._total]
        for fleet in self._ranked(fresh, base):
            if self.evaluations >= self.budget:
                return
            found = self.placed(self._at_home(fleet))
            self._seen[fleet] = found
            if found is not None:
                self._fleet_of[id(found.plan)] = fleet
                yield found

    def _ranked(self, fleets: Sequence[Fleet], base: Fleet) -> list[Fleet]:
        """The most promising first: two in the pools that run now for one that uses others.

        Rough times are fair among fleets of the same pools only, so the two do not compete.
        """
        running = self.running.templates
        used = {step.lot for template in running for step in template.steps}
        cuts = {template.cuts for template in running}
        some = [*fleets, *([base] if base.templates else ())]
        if not some:
            return []
        seconds = rough_seconds(some, [self._total] * len(some)).tolist()
        roughly = list(map(self.by._atlas.rough, some, seconds))
        most = ROUGH_WORSE_MAX * roughly.pop() if base.templates else math.inf
        now = dict(zip(base.templates, base.counts, strict=True))
        order: tuple[list[tuple[float, int, int, Fleet]], ...] = ([], [])
        for number, (fleet, rough) in enumerate(zip(fleets, roughly, strict=True)):
            if rough > most:
                continue
            # Layers that all pipelines cut alike are summed with the fewest messages.
            is_odd = any(template.cuts not in cuts for template in fleet.templates)
            worth = rough * ROUGH_OTHER_CUTS if is_odd else rough
            counts = dict(zip(fleet.templates, fleet.counts, strict=True))
            changes = sum(abs(counts.get(t, 0) - now.get(t, 0)) for t in {**counts, **now})
            strays = any(s.lot not in used for t in fleet.templates for s in t.steps)
            order[strays].append((worth, changes, number, fleet))
        places = [
            (3 * place + 2 if strays else place + place // 2, fleet)
            for strays, some in enumerate(order)
            for place, (*_, fleet) in enumerate(sorted(some, key=lambda one: one[:3]))
        ]
        return [fleet for _, fleet in sorted(places, key=lambda pair: pair[0])]

    def _at_home(self, fleet: Fleet) -> Plan:
        """The fleet as a plan, with the pipelines that run on where they run."""
        homes: defaultdict[Template, list[int]] = defaultdict(list)
        for p in self._damage.alive:
            homes[self.running.templates[p]].append(p)
        plan = plan_of(fleet, self._total, self.lots)
        made = (t for t, n in zip(fleet.templates, fleet.counts, strict=True) for _ in range(n))
        pipelines = []
        for pipeline, template in zip(plan.pipelines, made, strict=True):
            here = homes.get(template)
            if here:
                stages = self.running.plan.pipelines[here.pop(0)].stages
                pipelines.append(Pipeline(pipeline.micro_batches, stages))
            else:
                pipelines.append(pipeline)
        return replace(plan, pipelines=tuple(pipelines))


def _worth(candidate: Candidate) -> tuple[float, ...]:
    return candidate.worth
