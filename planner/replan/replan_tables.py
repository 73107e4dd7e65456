"""What replanning one job computes once: estimator, templates, state sizes, transfer prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.problem.inventory import Lot, lots_of
from planner.problem.job_options import micro_batch_sizes, token_sharing_degrees, tp_degrees
from planner.problem.objective import Limits
from planner.replan.assign_nodes import assign
from planner.replan.damage import RunningPlan, check_replannable, template_of, template_size
from planner.replan.move_cost import DEFAULT_TIMES, MoveTimes
from planner.replan.nodes import PlannerNode, is_placed, placement_of, spot_by_id
from planner.replan.repairs import template_lots
from planner.replan.state_map import TrainingState, state_of
from planner.replan.transfers import Routes
from planner.search.local_search import EventSearch
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.job import Job
from simulator.spec.plan import Plan

UNPRICED_USD_PER_GPU_HOUR = 2.0
"""Assumed price where none is known; it only weighs a second of downtime against egress."""


@dataclass(eq=False)
class ReplanTables:
    """Tables for one job and the pools that its cluster may have.

    Building them takes time, so they are made once. Prices, links and machine types are fixed;
    the nodes that are up come with each question.
    """

    job: Job
    cluster: Cluster
    measurements: Measurements
    seconds_left: float | None = None
    times: MoveTimes = DEFAULT_TIMES
    judge: EventEstimator = field(init=False)
    limits: Limits = field(init=False)
    lots: tuple[Lot, ...] = field(init=False)
    state: TrainingState = field(init=False)
    routes: Routes = field(init=False)
    _templates: dict[bool, EventSearch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        judge = estimator(
            "event", job=self.job, cluster=self.cluster, measurements=self.measurements
        )
        assert isinstance(judge, EventEstimator)
        self.judge = judge
        self.limits = Limits(self.job.objective, self.job.steps, self.seconds_left)
        # A pool with nothing up counts as one machine, so that it has a lot.
        pools = tuple(replace(p, gpus=p.gpus or p.gpus_per_machine) for p in self.cluster.pools)
        self.lots = lots_of(replace(self.cluster, pools=pools), judge.facts)
        self.state = state_of(judge.costs)
        self._templates_if(shares_tokens=False)
        prices = [(lot.gpus, lot.price_usd_per_gpu_hour) for lot in self.lots]
        hourly = sum(n * (UNPRICED_USD_PER_GPU_HOUR if p is None else p) for n, p in prices)
        self.routes = Routes(judge.network, hourly / 3600)

    def templates_of(self, plan: Plan) -> EventSearch:
        """Return templates for every lot, as they are with or without sequence parallelism."""
        return self._templates_if(shares_tokens=plan.sequence_parallel)

    def _templates_if(self, *, shares_tokens: bool) -> EventSearch:
        if shares_tokens not in self._templates:
            judge, job = self.judge, self.job
            costs = judge.costs_if(shares_tokens=shares_tokens)
            self._templates[shares_tokens] = EventSearch(
                job,
                self.lots,
                (),
                TemplateMaker(costs, judge.network, judge.facts, self.lots),
                judge,
                self.limits,
                micro_batch_sizes(job),
                token_sharing_degrees(job) if shares_tokens else tp_degrees(job),
                0,
            )
        return self._templates[shares_tokens]

    # -- the running plan -----------------------------------------------------------------------

    def place(self, plan: Plan, nodes: Sequence[PlannerNode]) -> Plan | None:
        """Assign nodes and devices to a plan that does not run yet; ``None`` if it does not fit."""
        return assign(plan, nodes, running=None, state=self.state, routes=self.routes)

    def prepare(self, plan: Plan, nodes: Sequence[PlannerNode]) -> RunningPlan:
        """Prepare a placed plan for replanning, before anything is lost from its nodes."""
        lot_of = {lot.key: k for k, lot in enumerate(self.lots)}
        check_replannable(plan, self.job, lot_of)
        assert is_placed(plan), "place a plan before it is replanned"
        self._make_templates(plan)
        maker, known = self.templates_of(plan).maker, dict[object, Template]()
        size, templates = template_size(plan, self.job), []
        for pipeline in plan.pipelines:
            key = tuple(
                (s.layers, s.tp, s.recompute, s.place.gpu, s.place.machine, s.place.zone)
                for s in pipeline.stages
            )
            if key not in known:
                known[key] = template_of(pipeline, plan, size, maker, lot_of)
            templates.append(known[key])
        together = placement_of(plan, self.judge.facts.machines)
        estimate = self.judge.estimate_on(plan, spot_by_id(nodes))
        return RunningPlan(plan, estimate, tuple(templates), together)

    def _make_templates(self, plan: Plan) -> None:
        """Make the templates that a question may need, so that no question waits for them."""
        size = template_size(plan, self.job)
        for lots in template_lots(self.lots):
            self.templates_of(plan).templates(lots, size, self.job.global_batch // size)
