"""The running plan prepared for replanning, and what losses of nodes broke in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.problem.job_options import micro_batch_sizes
from planner.replan.assign_nodes import stage_is_alive
from planner.replan.nodes import PlannerNode
from planner.replan.state_map import layers_of
from simulator.documents.problems import Problems
from simulator.estimate.result import Estimate
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, PlaceKey, Plan


@dataclass(frozen=True, slots=True, eq=False)
class RunningPlan:
    """A placed plan, with what replanning needs again and again."""

    plan: Plan
    estimate: Estimate
    templates: tuple[Template, ...]
    """The template of each pipeline, all of one micro batch size; the chunks of a device group are
    one stage of it."""
    together: int | None
    """``Plan.together`` as the running plan's nodes show it; new pipelines are placed alike."""


@dataclass(frozen=True, slots=True)
class BrokenPipeline:
    """A pipeline that lost some of its stages."""

    template: Template
    lost_stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """The pipelines that survive on the nodes that are up, and those that do not."""

    alive: tuple[int, ...]
    """Indices of the pipelines that still have all their devices."""
    broken: tuple[BrokenPipeline, ...]


def damage(running: RunningPlan, nodes: Sequence[PlannerNode]) -> Damage:
    """Separate the pipelines that can go on from those that lost devices."""
    by_id = {node.id: node for node in nodes}
    alive, broken = [], []
    for p, pipeline in enumerate(running.plan.pipelines):
        lost = tuple(
            s
            for s, stage in enumerate(running.plan.owning_stages(pipeline))
            if not stage_is_alive(stage, by_id)
        )
        if lost:
            broken.append(BrokenPipeline(running.templates[p], lost))
        else:
            alive.append(p)
    return Damage(tuple(alive), tuple(broken))


def template_size(plan: Plan, job: Job) -> int:
    """The micro batch size of the templates of a running plan: what all its pipelines can hold."""
    least, *others = plan.sizes
    if not others:
        return least
    return max((size for size in micro_batch_sizes(job) if size <= least), default=1)


def template_of(
    pipeline: Pipeline, plan: Plan, size: int, maker: TemplateMaker, lot_of: Mapping[PlaceKey, int]
) -> Template:
    """The template that makes this pipeline of a plan, but for its chunks and its size."""
    groups = plan.chunks(pipeline)
    stages = tuple(maker.stage_of(first, lot_of[first.place.key]) for first, *_ in groups)
    sizes = (sum(end - first for first, end in layers_of(stages)) for stages in groups)
    cuts = tuple(accumulate(sizes, initial=0))
    return maker.timed(stages, size, cuts)


def check_replannable(plan: Plan, job: Job, known: Mapping[PlaceKey, int]) -> None:
    """Refuse plans that replanning does not support, reporting all problems at once."""
    problems, unsupported = Problems(), "replanning does not support them; run sailorctl plan"
    if plan.schedule not in ("1f1b", "interleaved"):
        problems.add(
            "plan",
            f'has the schedule "{plan.schedule}"',
            "replanning supports 1f1b and interleaved only; run sailorctl plan",
        )
    if plan.outer_every is not None:
        problems.add("plan", "takes outer steps", unsupported)
    if plan.offloads:
        problems.add("plan", "offloads activations", unsupported)
    if plan.zero not in (None, job.zero):
        what = f"has zero = {plan.zero}, but the job trains with zero = {job.zero}"
        problems.add("plan", what, f"set training.zero = {plan.zero} in the job")
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(len(stage.places) > 1 for stage in stages):
        problems.add("plan", "has split stages", unsupported)
    keys = {p.key for stage in stages for p in stage.places}
    for gpu, machine, zone in sorted(keys - set(known)):
        problems.add(
            "plan",
            f"uses {gpu} in {machine} in {zone}, which the cluster file does not list",
            "list the pool with gpus = 0 if none of it is up",
        )
    problems.raise_if_any()
