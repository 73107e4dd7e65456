"""The plan of ``status``: equal pipelines share a column, and a single one names its nodes."""

from __future__ import annotations

from typing import Any

from sailord.text.plan_text import PipelineKind, StageGroup, pipeline_kinds, plan_lines


def stage(layers: tuple[int, int], node: str, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "gpu": "T4", "tp": 1, "zone": "z", "node": f"{node}.7", **more}


def test_pipeline_of_its_own_kind_names_its_nodes():
    two = [{"stages": [stage((0, 6), name)]} for name in ("a1", "a2")]
    split = {"stages": [stage((0, 4), "b1"), stage((4, 6), "b2")]}
    lines = "\n".join(plan_lines({"pipelines": [*two, split]})).splitlines()
    assert [line.rstrip() for line in (lines[1], *lines[3:])] == [
        "stage  pipelines 0-1  pipeline 2",
        "    0  0-5 T4 tp 1 z  0-3 T4 tp 1 z on b1",
        "    1                 4-5 T4 tp 1 z on b2",
    ]


def test_stage_on_several_nodes_names_each_once():
    places = [{"gpu": "T4", "zone": "z", "node": f"{name}.7"} for name in ("a1", "a1", "a2")]
    lines = plan_lines({"pipelines": [{"stages": [stage((0, 6), "a1", places=places)]}]})
    assert lines[-1].endswith("on a1, a2")


def test_plan_without_named_nodes_has_none():
    lines = plan_lines({"pipelines": [{"stages": [stage((0, 6), "") | {"node": None}]}]})
    assert lines[-1].endswith("0-5 T4 tp 1 z")


def test_chunks_of_a_stage_group_share_a_row():
    chunks = [((0, 1), "a1"), ((1, 3), "b1"), ((3, 4), "a1"), ((4, 6), "b1")]
    stages = [stage(layers, node) for layers, node in chunks]
    lines = plan_lines({"pipelines": [{"stages": stages}], "virtual_stages": 2})
    assert [line.strip() for line in "\n".join(lines).splitlines()[3:]] == [
        "0  0-0, 3-3 T4 tp 1 z on a1",
        "1  1-2, 4-5 T4 tp 1 z on b1",
    ]


def test_kinds_of_pipelines_are_told_apart_by_layers_devices_and_zone_alone():
    """A stage with several places has the first one's GPU and zone."""
    places = [{"gpu": "V100", "zone": "y", "node": f"{name}.7"} for name in ("a4", "a5")]
    split = stage((0, 6), "", places=places)
    del split["gpu"], split["zone"], split["node"]
    alike = [{"stages": [stage((0, 6), name)]} for name in ("a1", "a2")]
    plan = {"pipelines": [alike[0], {"stages": [split]}, alike[1]]}
    assert pipeline_kinds(plan) == [
        PipelineKind((StageGroup(((0, 6),), "T4", 1, "z"),), (0, 2), ()),
        PipelineKind((StageGroup(((0, 6),), "V100", 1, "y"),), (1,), (("a4", "a5"),)),
    ]
