"""Predicts the next move off a plan's nodes, before it is known which of them will go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.replan.move_cost import cost_of_move
from planner.replan.nodes import PlannerNode
from planner.replan.replan_tables import ReplanTables
from planner.replan.state_map import held_by_node
from planner.replan.transfers import transfers_of
from simulator.estimate.result import Estimate
from simulator.spec.plan import Pipeline, Plan, Stage


def replacement_s(
    tables: ReplanTables, plan: Plan, estimate: Estimate, nodes: Sequence[PlannerNode]
) -> float:
    """Return how long a planned move takes that replaces the node with the most state.

    The new node is of the same kind and fetches all of it while the old one is still up.
    """
    state = tables.state
    held = held_by_node(plan, nodes, state)
    largest = max(nodes, key=lambda node: (float(held[node.id] @ state.bytes_by_unit), node.id))
    going = replace(largest, id=f"{largest.id} before")
    there = (*nodes, going)
    before = _move_node(plan, largest.id, going.id)
    return seconds_to(tables, plan, estimate, there, running=before, is_planned=True)


def seconds_to(
    tables: ReplanTables,
    plan: Plan,
    estimate: Estimate,
    nodes: Sequence[PlannerNode],
    *,
    running: Plan | None,
    is_planned: bool,
) -> float:
    """Return how long a move to the plan takes at equal speed.

    Without a ``running`` plan the state comes from a checkpoint.
    """
    state = tables.state
    return cost_of_move(
        plan,
        transfers_of(plan, nodes, running=running, state=state, routes=tables.routes),
        nodes,
        state=state,
        network=tables.judge.network,
        old_iteration_s=estimate.iteration_s,
        new_iteration_s=estimate.iteration_s,
        is_planned=is_planned,
        usd_per_hour=None,
        times=tables.times,
    ).seconds


def _move_node(plan: Plan, node: str, to: str) -> Plan:
    """Return the plan with everything on one node moved to another."""

    def stage(each: Stage) -> Stage:
        places = (replace(p, node=to) if p.node == node else p for p in each.places)
        return replace(each, places=tuple(places))

    def pipeline(each: Pipeline) -> Pipeline:
        return replace(each, stages=tuple(map(stage, each.stages)))

    return replace(plan, pipelines=tuple(map(pipeline, plan.pipelines)))
