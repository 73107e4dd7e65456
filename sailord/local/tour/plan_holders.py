"""Which nodes hold which layers under a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any


def pipelines_of(plan: Mapping[str, Any]) -> list[list[tuple[range, str]]]:
    """Return the layers and the node of each stage, by pipeline."""
    return [
        [(range(*stage["layers"]), _node(stage)) for stage in pipeline["stages"]]
        for pipeline in plan["pipelines"]
    ]


def _node(stage: Mapping[str, Any]) -> str:
    (place,) = stage.get("places") or [stage]
    return str(place["node"])


def sole_holders(plan: Mapping[str, Any]) -> list[str]:
    """Return the nodes that alone hold some layer, in stage order."""
    holders: dict[int, set[str]] = defaultdict(set)
    order: dict[str, None] = {}
    for pipeline in pipelines_of(plan):
        for layers, node in pipeline:
            order[node] = None
            for layer in layers:
                holders[layer].add(node)
    alone = {next(iter(nodes)) for nodes in holders.values() if len(nodes) == 1}
    return [node for node in order if node in alone]


def replicated_holders(plan: Mapping[str, Any], *, longest_first: bool = False) -> list[str]:
    """Return the nodes whose layers other nodes hold, too; pipelines ordered by length."""
    alone = set(sole_holders(plan))
    ordered = sorted(pipelines_of(plan), key=len, reverse=longest_first)
    return [node for pipeline in ordered for _, node in pipeline if node not in alone]


def middle_node(nodes: list[str], plan: Mapping[str, Any]) -> str:
    """Return one of the nodes, preferably from the middle of a pipeline."""
    ends = {node for pipeline in pipelines_of(plan) for _, node in (pipeline[0], pipeline[-1])}
    return next((node for node in nodes if node not in ends), nodes[0])
