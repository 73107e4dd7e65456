"""Who holds which layers under a plan: whom a loss hurts, and whom it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any


def pipelines_of(plan: Mapping[str, Any]) -> list[list[tuple[range, str]]]:
    """Each pipeline's stages: their layers and their node."""
    return [
        [(range(*stage["layers"]), _node(stage)) for stage in pipeline["stages"]]
        for pipeline in plan["pipelines"]
    ]


def _node(stage: Mapping[str, Any]) -> str:
    (place,) = stage.get("places") or [stage]
    return str(place["node"])


def only_holders(plan: Mapping[str, Any]) -> list[str]:
    """Nodes without which a layer would have no holder, in the order of their stages."""
    holders: dict[int, set[str]] = defaultdict(set)
    order: dict[str, None] = {}
    for pipeline in pipelines_of(plan):
        for layers, node in pipeline:
            order[node] = None
            for layer in layers:
                holders[layer].add(node)
    alone = {next(iter(nodes)) for nodes in holders.values() if len(nodes) == 1}
    return [node for node in order if node in alone]


def shared_holders(plan: Mapping[str, Any], *, longest_first: bool = False) -> list[str]:
    """Nodes whose layers all live elsewhere too, pipeline by pipeline in order of their length."""
    alone = set(only_holders(plan))
    ordered = sorted(pipelines_of(plan), key=len, reverse=longest_first)
    return [node for pipeline in ordered for _, node in pipeline if node not in alone]


def inner(nodes: list[str], plan: Mapping[str, Any]) -> str:
    """One of the nodes, in the middle of its pipeline if there is such a one."""
    ends = {node for pipeline in pipelines_of(plan) for _, node in (pipeline[0], pipeline[-1])}
    return next((node for node in nodes if node not in ends), nodes[0])
