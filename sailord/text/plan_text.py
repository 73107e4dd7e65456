"""A running job's plan: its kinds of pipelines, and these as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sailord.text.table import table
from sailord.text.units import number_ranges

PIPELINES_MAX = 4
"""Columns of a plan's table; more kinds of pipelines go into further tables below."""


@dataclass(frozen=True, slots=True)
class StageGroup:
    """What one stage group of a pipeline computes, and on what."""

    layers: tuple[tuple[int, int], ...]
    """Of each of its chunks: the first layer, and the one after the last."""
    gpu: str
    tp: int
    zone: str


@dataclass(frozen=True, slots=True)
class PipelineKind:
    """Pipelines that are alike but for their nodes."""

    groups: tuple[StageGroup, ...]
    numbers: tuple[int, ...]
    """Their numbers in the plan."""
    nodes: tuple[tuple[str, ...], ...]
    """The nodes of each stage group, if there is one such pipeline."""


def pipeline_kinds(plan: Mapping[str, Any]) -> list[PipelineKind]:
    """Return the kinds of pipelines of a plan, as the API answers it, by their first pipeline."""
    kinds: dict[tuple[StageGroup, ...], list[int]] = {}
    chunks = plan.get("virtual_stages", 1)
    for number, pipeline in enumerate(plan["pipelines"]):
        stages = pipeline["stages"]
        count = len(stages) // chunks
        groups = tuple(_group(stages[first::count]) for first in range(count))
        kinds.setdefault(groups, []).append(number)
    return [
        PipelineKind(
            groups,
            tuple(numbers),
            tuple(map(_nodes, plan["pipelines"][numbers[0]]["stages"][: len(groups)]))
            if len(numbers) == 1
            else (),
        )
        for groups, numbers in kinds.items()
    ]


def _group(stages: list[Mapping[str, Any]]) -> StageGroup:
    """Return the group that has these stages, one of each chunk."""
    place = stages[0]["places"][0] if "places" in stages[0] else stages[0]
    layers = tuple((first, end) for first, end in (stage["layers"] for stage in stages))
    return StageGroup(layers, place["gpu"], stages[0]["tp"], place["zone"])


def _nodes(stage: Mapping[str, Any]) -> tuple[str, ...]:
    ids = [place.get("node") for place in stage.get("places", [stage])]
    return tuple(dict.fromkeys(id_.partition(".")[0] for id_ in ids if id_))


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan as tables: one row per stage group, one column per kind of pipeline.

    Where a kind has one pipeline only, its nodes are named.
    """
    kinds, lines = pipeline_kinds(plan), list[str]()
    for begin in range(0, len(kinds), PIPELINES_MAX):
        shown = kinds[begin : begin + PIPELINES_MAX]
        header = ["stage"]
        for kind in shown:
            noun = "pipeline" if len(kind.numbers) == 1 else "pipelines"
            header.append(f"{noun} {number_ranges(kind.numbers)}")
        rows = [
            [str(stage), *(_cell(kind, stage) for kind in shown)]
            for stage in range(max(len(kind.groups) for kind in shown))
        ]
        lines += ["", table(header, rows)]
    return lines


def _cell(kind: PipelineKind, number: int) -> str:
    if number >= len(kind.groups):
        return ""
    group = kind.groups[number]
    layers = ", ".join(f"{first}-{end - 1}" for first, end in group.layers)
    nodes = ", ".join(kind.nodes[number]) if kind.nodes else ""
    return f"{layers} {group.gpu} tp {group.tp} {group.zone}{f' on {nodes}' if nodes else ''}"
