"""Runs in planner processes: the predicted schedule of one iteration of the running plan."""

from __future__ import annotations

from typing import Any

from sailord.planning.live_cluster import planner_node
from sailord.planning.messages import PlanRequest
from sailord.planning.plan_search import replanner_for
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.estimate.event_estimator import EventEstimator, IterationDetails
from simulator.inputs.plan_file import plan_from_document
from simulator.spec.plan import Plan

PIPELINES_MAX = 4
"""Most distinct pipelines in a schedule."""
PASSES_MAX = 2_000
"""Most passes of a pipeline in a schedule, which repeats itself."""


def timeline(request: PlanRequest) -> dict[str, Any] | str:
    """Return the passes of each different pipeline, or why there are none."""
    assert request.running is not None
    try:
        plan = plan_from_document(parse_document(request.running, name="the running plan"))
        nodes = [planner_node(record) for record in request.nodes]
        return schedule(plan, replanner_for(request, nodes).judge)
    except InputError as error:
        return "; ".join(map(str, error.problems))


def schedule(plan: Plan, judge: EventEstimator) -> dict[str, Any]:
    """Return the schedule as plain values; times are seconds from the iteration's start."""
    details = judge.details(plan)
    same: dict[int, list[int]] = {}
    for number, work in enumerate(details.pipelines):
        same.setdefault(id(work), []).append(number)
    return {
        "iteration_s": judge.estimate(plan).iteration_s,
        "shapes": len(same),
        "pipelines": [
            {"numbers": numbers, "groups": _groups(plan, numbers[0], details)}
            for numbers in list(same.values())[:PIPELINES_MAX]
        ],
    }


def _groups(plan: Plan, p: int, details: IterationDetails) -> list[dict[str, Any]]:
    """Return each stage group with its forward and backward passes, its sums and its update."""
    pipeline, work = plan.pipelines[p], details.pipelines[p]
    owners = plan.group_count(pipeline)
    before = [stage for each in plan.pipelines[:p] for stage in plan.owning_stages(each)]
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for span in details.passes[p].spans[:PASSES_MAX]:
        s, i = work.groups[span.group]
        group = found.get((s % owners, i))
        if group is None:
            stage = pipeline.stages[s % owners]
            place = stage.places[i]
            group = found[s % owners, i] = {
                "stage": s % owners,
                "layers": list(stage.layers),
                "gpu": place.gpu,
                "zone": place.zone,
                "node": place.node,
                "tp": stage.tp,
                "rank": sum(each.device_count for each in (*before, *pipeline.stages[: s % owners]))
                + i * stage.tp,
                "passes": [],
                "sync": [],
                "update": [],
            }
        times = [round(span.start, 6), round(span.end, 6)]
        group["passes"].append([span.kind, *times, span.micro_batch])
    for (s, i), group in found.items():
        end = details.step_end[p, s, i]
        group["update"] = [round(end - details.optimizer_s[p, s, i], 6), round(end, 6)]
    for start, job in details.sync:
        for owner, s, i in job.holders:
            if owner == p and (s % owners, i) in found:
                times = [round(start, 6), round(start + job.seconds, 6)]
                found[s % owners, i]["sync"].append(times)
    return [found[key] for key in sorted(found)]
