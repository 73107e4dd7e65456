"""The running plan prepared for replanning, and what losses of nodes broke in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.pipelines.pipeline_template import Template, TemplateMaker, template_stage
from planner.replan.assign_nodes import stage_is_alive
from planner.replan.nodes import Node
from simulator.documents.problems import Problems
from simulator.estimate.result import Estimate
from simulator.spec.plan import Pipeline, PlaceKey, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A placed plan, with what replanning needs again and again."""

    plan: Plan
    estimate: Estimate
    templates: tuple[Template, ...]
    """The template of each pipeline."""
    together: int | None
    """``Plan.together`` as the running plan's nodes show it; new pipelines are placed alike."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A pipeline that lost some of its stages."""

    template: Template
    lost_stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """The pipelines that survive on the nodes that are up, and those that do not."""

    alive: tuple[int, ...]
    """Indices of the pipelines that still have all their devices."""
    broken: tuple[Broken, ...]


def damage(running: Running, nodes: Sequence[Node]) -> Damage:
    """Separate the pipelines that can go on from those that lost devices."""
    by_id = {node.id: node for node in nodes}
    alive, broken = [], []
    for p, pipeline in enumerate(running.plan.pipelines):
        lost = tuple(
            s for s, stage in enumerate(pipeline.stages) if not stage_is_alive(stage, by_id)
        )
        if lost:
            broken.append(Broken(running.templates[p], lost))
        else:
            alive.append(p)
    return Damage(tuple(alive), tuple(broken))


def template_of(
    pipeline: Pipeline, micro_batch: int, maker: TemplateMaker, lot_of: Mapping[PlaceKey, int]
) -> Template:
    """The template that makes this pipeline."""
    stages = tuple(template_stage(s, lot_of[s.place.key]) for s in pipeline.stages)
    cuts = (0, *(stage.layers[1] for stage in pipeline.stages))
    return maker.timed(stages, micro_batch, cuts)


def check_replannable(plan: Plan, known: Mapping[PlaceKey, int], *, place: str = "plan") -> None:
    """Refuse plans that replanning does not support, reporting all problems at once."""
    problems = Problems()
    if plan.schedule != "1f1b":
        problems.add(
            place,
            f'has the schedule "{plan.schedule}"',
            "replanning supports 1f1b only; run sailorctl plan",
        )
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(len(stage.places) > 1 for stage in stages):
        problems.add(
            place, "has split stages", "replanning does not support them; run sailorctl plan"
        )
    keys = {p.key for stage in stages for p in stage.places}
    for gpu, machine, zone in sorted(keys - set(known)):
        problems.add(
            place,
            f"uses {gpu} in {machine} in {zone}, which the cluster file does not list",
            "list the pool with gpus = 0 if none of it is up",
        )
    problems.raise_if_any()
