"""Trace files: all formats are read, and mistakes are reported at once."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.files import load_document, parse_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.traces.trace import Trace, cluster_at
from simulator.traces.trace_file import COLLECTIONS, TraceChoice, load_trace, trace_from_document
from tests.conftest import ROOT

A, B = "us-central1-a", "us-west1-a"
EAST = Pool(A, "A100-40", "a2-highgpu-4g", 4, 16, price_usd_per_gpu_hour=3.0)
WEST = Pool(B, "V100-16", "V100-16x8", 8, 8, spot=True, price_usd_per_gpu_hour=1.0)
CLUSTER = Cluster((EAST, WEST), load_catalogue())
ALONE = Cluster((EAST,), load_catalogue())
SCHEMA = json.loads((ROOT / "simulator/data/schemas/trace.schema.json").read_text("utf-8"))


def read(
    text: str | dict[str, Any], cluster: Cluster = CLUSTER, **choice: Any
) -> list[tuple[float, float, tuple[int, ...]]]:
    raw = text if isinstance(text, str) else json.dumps(text)
    document = parse_document(raw.encode(), name="trace", flaws_raise=False)
    return spans(trace_from_document(document, cluster, TraceChoice(**choice)))


def spans(trace: Trace) -> list[tuple[float, float, tuple[int, ...]]]:
    return [(i.start_s, i.end_s, i.gpus) for i in trace.intervals]


def wrong(text: str | dict[str, Any], cluster: Cluster = CLUSTER, **choice: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(text, cluster, **choice)
    return [str(problem) for problem in caught.value.problems]


def event(time_s: object, **keys: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(["[[event]]", f"time_s = {time_s}", *lines, ""])


def test_events_change_one_pool_each_starting_from_the_cluster() -> None:
    text = "end_s = 100\n" + "".join(
        (
            event(10, zone=A, gpus=8),
            event(20, machine="a2-highgpu-4g", machines_change=1),
            event(20, gpu="v100-16", gpus_change=-3),
            event(30, zone=B, spot=True, machines=0),
            event(40, zone=B, machines=0),
        )
    )
    jsonschema.validate(parse_document(text.encode(), name="trace").data, SCHEMA)
    assert read(text) == [(0, 10, (16, 8)), (10, 20, (8, 8)), (20, 30, (12, 5)), (30, 100, (12, 0))]
    assert read(text, until_s=15) == [(0, 10, (16, 8)), (10, 15, (8, 8))]
    assert read(text, from_s=25) == [(0, 5, (12, 5)), (5, 75, (12, 0))]
    assert read(text, from_s=25, until_s=75) == read(text, from_s=25)


@pytest.mark.parametrize("end", ["end_s = 1000\n", ""])
def test_a_replay_begins_and_ends_within_the_trace(end: str) -> None:
    text = end + event(0, zone=A, gpus=8) + event(900, zone=A, gpus=4)
    last = "1000" if end else "900"
    told = f"--from: is 5000, and the trace ends at {last}; begin earlier"
    assert wrong(text, from_s=5000, until_s=600) == [told]
    if end:
        told = "--until: is 600, and the trace ends 200 s after the beginning"
        assert wrong(text, from_s=800, until_s=600)[0].startswith(told)
        assert "ends 1000 s after" in wrong(text, until_s=1001)[0]
    else:  # The last event has no duration but this one.
        assert read(text, from_s=800, until_s=600) == [(0, 100, (8, 8)), (100, 600, (4, 8))]


def test_points_hold_until_the_next_one() -> None:
    points = [{"time_s": 0, "gpus": 4}, {"time_s": 60, "gpus": 4}, {"time_s": 120, "gpus": 2}]
    assert read({"points": points, "end_s": 200}, ALONE) == [(0, 120, (4,)), (120, 200, (2,))]
    # Without an end the last point has no duration.
    assert read({"changes": points}, ALONE) == [(0, 120, (4,))]
    one = {"points": [{"time_s": 0, "gpus": 1}], "end_s": 60}
    assert read(one, pool="V100-16@us-west1-a") == [(0, 60, (16, 1))]


def test_a_trace_that_begins_late_is_a_mistake() -> None:
    later = {"points": [{"time_s": 50, "gpus": 1}, {"time_s": 55, "gpus": 2}], "end_s": 60}
    assert wrong(later, ALONE) == [
        "trace: points[0].time_s: is 50: the trace says nothing of the time before;"
        " give a point at 0"
    ]


def test_counts_beyond_the_cluster_and_unknown_keys_are_mistakes() -> None:
    west = {"gpu_type": "V100-16", "zone": B, "gpus": 9, "node": "x"}
    points = [{"time_s": 0, "available": [west], "gpu": 1}]
    told = wrong({"points": points, "end_s": 5, "ends": 7, "source": "published"})
    assert [problem.partition(";")[0] for problem in told] == [
        'trace: points[0].available[0]: has an unknown key "node"',
        'trace: points[0]: has an unknown key "gpu"',
        "trace: points[0]: has 9 GPUs of V100-16@us-west1-a, where the cluster has 8",
        'trace: has an unknown key "ends"',
    ]
    (told_,) = wrong(
        "end_s = 9\n" + event(1, zone=A, machines_change=1) + event(2, zone=A, gpus=17)
    )
    assert "[[event]] 1: has 20 GPUs of A100-40@us-central1-a, where the cluster has 16" in told_
    more = Cluster((replace(EAST, obtainable_gpus=4), WEST), load_catalogue())
    assert read("end_s = 9\n" + event(1, zone=A, machines_change=1), more)[-1][2] == (20, 8)


def test_machines_count_once_they_booted_and_until_their_loss_is_announced() -> None:
    points = [{"time_s": t, "gpus": n} for t, n in ((0, 8), (100, 12), (200, 16), (300, 4))]
    plain = {"points": points, "end_s": 400}
    booted = read({**plain, "boot_s": 60}, ALONE)
    assert booted == [(0, 160, (8,)), (160, 260, (12,)), (260, 300, (16,)), (300, 400, (4,))]
    announced = read({**plain, "boot_s": 60, "notice_s": 30}, ALONE)
    assert announced == [(0, 160, (8,)), (160, 260, (12,)), (260, 270, (16,)), (270, 400, (4,))]
    # What is lost before it has booted never counts.
    assert read({**plain, "boot_s": 150}, ALONE)[1:] == [(250, 300, (12,)), (300, 400, (4,))]
    # What boots longer than the trace lasts never counts, and no fraction of a second is lost.
    late = [{"time_s": t, "gpus": n} for t, n in ((0, 8), (100, 12), (390, 16))]
    assert read({"points": late, "end_s": 400, "boot_s": 60}, ALONE) == [
        (0, 160, (8,)),
        (160, 400, (12,)),
    ]
    for at_s in (100.7, 100.1, 33.3):
        added = [{"time_s": 0, "gpus": 8}, {"time_s": at_s, "gpus": 16}]
        found = read({"points": added, "end_s": 400, "boot_s": 60}, ALONE)
        assert found == [(0, at_s + 60, (8,)), (at_s + 60, 400, (16,))]
        taken = [{"time_s": 0, "gpus": 16}, {"time_s": at_s, "gpus": 8}]
        found = read({"points": taken, "end_s": 400, "notice_s": 0.3}, ALONE)
        assert found == [(0, at_s - 0.3, (16,)), (at_s - 0.3, 400, (8,))]
    # A part of the trace is as in the whole: a machine that boots as it begins does not count yet,
    # nor one whose loss is announced before it ends.
    part = read({**plain, "boot_s": 60, "notice_s": 30}, ALONE, from_s=130, until_s=150)
    assert part == [(0, 30, (8,)), (30, 130, (12,)), (130, 140, (16,)), (140, 150, (4,))]
    document = parse_document(json.dumps({**plain, "notice_s": 30}).encode(), name="trace")
    assert trace_from_document(document, ALONE, TraceChoice()).notice_s == 30


def test_listed_pool_is_empty_in_points_that_omit_it() -> None:
    east = {"gpu_type": "A100-40", "zone": A, "gpus": 12}
    west = {"gpu_type": "V100-16", "zone": B, "gpus": 4}
    points = [{"time_s": 0, "available": [east]}, {"time_s": 9, "available": [east, west]}]
    assert read({"points": points, "end_s": 20}) == [(0, 9, (12, 0)), (9, 20, (12, 4))]
    half = {**east, "gpus": 8}
    only = [{"time_s": 0, "available": [half, half]}]
    assert read({"points": only, "end_s": 5}) == [(0, 5, (16, 8))]


def test_cluster_at_changes_only_the_gpus_that_are_up() -> None:
    assert [pool.gpus for pool in cluster_at(CLUSTER, (3, 0)).pools] == [3, 0]


def test_lost_gpus_of_the_start_are_never_regained() -> None:
    text = "end_s = 90\n" + "".join(
        event(t, zone=A, gpus=n) for t, n in ((10, 8), (20, 16), (30, 8))
    )
    document = parse_document(text.encode(), name="trace")
    trace = trace_from_document(document, CLUSTER, TraceChoice())
    none: tuple[int, ...] = ()
    taken = (
        (none, none),
        (tuple(range(8, 16)), none),
        (none, none),
        ((0, 1, *range(10, 16)), none),
    )
    # Of the 16 at the start 8 are left; the next loss takes two of these and six of the new ones.
    assert [left[0] for left in trace.never_regained(taken)] == [16, 8, 8, 6]


def test_all_mistakes_are_reported_with_place_and_cure() -> None:
    text = "end_s = 50\n" + "".join(
        (
            event(10, zone=A, gpus=-1),
            event(5, zone=A, gpus=4),
            event(20, zone="us-east1-b", gpus=4),
            event(20, gpu="A101-40", gpus=4),
            event(20, gpus=4),
            event(20, zone=B, gpus_change=-9),
            event(20, zone=B, gpus=1, machines=1),
            event(60, zone=B, gpus=1),
            event(70, zone=B, size=1),
        )
    )
    told = "\n".join(wrong(text))
    for part in (
        "trace: [[event]] 1: gpus: is -1",
        "trace: [[event]] 2: time_s: is 5, but follows 10; sort by time",
        "[[event]] 3: is about us-east1-b, and the cluster file has no such pool",
        "[[event]] 4: gpu: ",
        "[[event]] 5: matches 2 pools",
        "[[event]] 6: gpus_change: leaves -1 GPUs: only 8 were up before",
        "[[event]] 7: gives gpus and machines; give one of",
        "[[event]] 8: time_s: is not before end_s, 50",
        '[[event]] 9: has an unknown key "size"',
        "[[event]] 9: gives no count",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("end_s = 5", "trace: has no event and no point; give [[event]]"),
        ("end_s = 5\nevent = []", "event: is an empty list; give at least one entry"),
        ("[[event]]\ntime_s = 0\ngpus = 1", "trace: end_s: is missing"),
        ("end_s = 0\n[[event]]\ntime_s = 0\ngpus = 1", "end_s: is 0; give a number above 0"),
        ({"points": []}, "points: is an empty list"),
        ({"points": [{"time_s": 0, "gpus": 4}]}, "gives no end for its last point"),
        ({"points": [{"time_s": 9, "gpus": 4}], "end_s": 5}, "has a point at 9, after its end_s"),
        ({"points": [{"gpus": 4}], "end_s": 5}, "points[0].time_s: is missing"),
        ({"points": [{"time_s": -1, "gpus": 4}], "end_s": 5}, "points[0].time_s: is -1"),
        ({"points": [{"time_s": 0, "gpus": 1.5}], "end_s": 5}, "points[0].gpus: is 1.5"),
        ({"availability": {"a": {"points": []}, "b": {}}}, "holds 2 traces; name one with --trace"),
    ],
)
def test_invalid_trace_is_rejected(text: str | dict[str, Any], told: str) -> None:
    assert told in "\n".join(wrong(text, ALONE))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0,add,a\n60000,add,b\n", "bamboo-events"),
        ("0,4\n21529,8\n", "counts"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 0]}', "skypilot"),
        ('{"at": 1, "gpus": {}}\n{"at": 9, "gpus": {}}\n', "sailord"),
    ],
)
def test_a_published_log_is_to_be_imported_first(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"log: is a log \({kind}\), not a trace; .* import`"):
        load_trace(path, ALONE)
    path.write_text('end_s = 5\nnodes = ["a", "b", "c"')
    with pytest.raises(InputError, match="is not valid TOML"):
        load_trace(path, ALONE)


def test_pool_must_be_named_if_there_are_several() -> None:
    points = {"points": [{"time_s": 0, "gpus": 4}], "end_s": 5}
    assert "choose one with --pool: A100-40@us-central1-a" in wrong(points)[0]
    assert (
        '--pool: is "A100@x", and the cluster file has no such' in wrong(points, pool="A100@x")[0]
    )


def test_trace_is_chosen_by_name() -> None:
    one = {"points": [{"time_s": 0, "gpus": 4}], "end_s": 5}
    many = {"availability": {"one": one}, "planner_experiments": {"two": one}}
    assert read(many, ALONE, name="two") == [(0, 5, (4,))]
    assert 'did you mean "two"' in wrong(many, ALONE, name="tow")[0]
    assert "leave --trace out" in wrong(one, ALONE, name="one")[0]


def test_examples_of_the_documentation_are_read() -> None:
    section = (ROOT / "docs/formats.md").read_text("utf-8").partition("\n## Trace\n")[2]
    section = section.partition("\n## ")[0]
    zones = load_cluster(ROOT / "examples/three-zones.toml")
    toml, *lists = re.findall(r"```(?:toml|json)\n(.*?)```", section, flags=re.DOTALL)
    jsonschema.validate(parse_document(toml.encode(), name="trace").data, SCHEMA)
    assert len(read(toml, zones)) == 3
    assert [len(read(text, ALONE)) for text in lists] == [2, 1]
    for keys in (SCHEMA["properties"], SCHEMA["properties"]["event"]["items"]["properties"]):
        for key, rule in keys.items():
            row = next((x for x in section.splitlines() if x.startswith(f"| `{key}` |")), "")
            assert key == "event" or rule["description"] in row


def test_example_trace_is_the_output_of_its_program() -> None:
    made = runpy.run_path(str(ROOT / "examples/make_trace.py"))
    path = ROOT / "examples/three-zones-trace.toml"
    assert path.read_text("utf-8") == made["trace"](7, 8)
    trace = load_trace(path, load_cluster(ROOT / "examples/three-zones.toml"))
    assert trace.end_s == 8 * 3600
    assert len(trace.distinct()) > 10


def test_recorded_traces_are_read(reference: Path) -> None:
    path = reference / "traces.json"
    data = load_document(path).data
    read_ = 0
    for group in COLLECTIONS:
        for name, raw in data[group].items():
            point = raw["points"][0]
            kinds = {
                (e["gpu_type"], e["zone"]) for p in raw["points"] for e in p.get("available", ())
            }
            pools = [
                Pool(zone, gpu, f"{gpu}x4", 4, 512, price_usd_per_gpu_hour=1.0)
                for gpu, zone in sorted(kinds)
            ]
            cluster = Cluster(tuple(pools) or (replace(EAST, gpus=64),), load_catalogue())
            until_s = None if len(raw["points"]) > 1 else 60.0
            trace = load_trace(path, cluster, TraceChoice(name, until_s=until_s))
            first = sum(e["gpus"] for e in point.get("available", ())) or point["gpus"]
            assert sum(trace.intervals[0].gpus) == first
            assert trace.end_s == raw.get("end_s", until_s or raw["points"][-1]["time_s"])
            if "changes" in raw:
                # Its own summary of changes; one at the very end lasts no time.
                expected = [c["gpus"] for c in raw["changes"] if c["time_s"] < raw["end_s"]]
                assert [i.gpus[0] for i in trace.intervals] == expected
            read_ += 1
    assert read_ == 8


def test_spot_and_on_demand_pools_of_one_machine_type_are_distinguished() -> None:
    both = Cluster((EAST, replace(EAST, spot=True, gpus=8)), load_catalogue())
    assert read("end_s = 9\n" + event(5, spot=True, gpus=0), both)[-1] == (5, 9, (16, 0))
    assert (
        "matches 2 pools of us-central1-a"
        in wrong("end_s = 9\n" + event(5, zone=A, gpus=0), both)[0]
    )


def test_pools_of_machines_that_lost_gpus_are_told_apart_by_pools_of_their_own() -> None:
    """No key of an event tells them apart, so the cure is in the cluster file."""
    left = replace(EAST, gpus_per_machine=2, gpus=2)
    text = "end_s = 9\n" + event(5, zone=A, machine=EAST.machine, spot=False, gpus=0)
    (told,) = wrong(text, Cluster((EAST, left), load_catalogue()))
    assert "2 pools of a2-highgpu-4g, us-central1-a, on demand in the cluster file" in told
    assert "leave gpus_left out of the cluster file, or give those machines pools of" in told
    own = replace(left, machine="A100-40x2")
    assert read(text, Cluster((EAST, own), load_catalogue()))[-1] == (5, 9, (0, 2))


def nodes_of(text: str | dict[str, Any], cluster: Cluster = ALONE) -> list[Any]:
    raw = text if isinstance(text, str) else json.dumps(text)
    document = parse_document(raw.encode(), name="trace")
    trace = trace_from_document(document, cluster, TraceChoice())
    return [(i.start_s, i.gpus[0], i.nodes[0] if i.nodes else None) for i in trace.intervals]


NAMED = "end_s = 100\n" + event(0, machines=3, nodes=["a", "b", "c"])


def test_events_name_the_nodes_that_are_added_and_lost() -> None:
    text = NAMED + "".join(
        (
            event(10, machines_change=-2, nodes=["c", "a"]),
            event(20, gpus_change=8, nodes=["d", "a"]),
            event(30, machines=2, nodes=["e", "d"]),
            event(40, gpus=0),
        )
    )
    jsonschema.validate(parse_document(text.encode(), name="trace").data, SCHEMA)
    assert nodes_of(text) == [
        (0, 12, ("a", "b", "c")),
        (10, 4, ("b",)),
        (20, 12, ("b", "d", "a")),
        (30, 8, ("d", "e")),
        (40, 0, ()),
    ]
    # Names count from the point on at which all nodes that are up have one.
    assert nodes_of("end_s = 9\n" + event(5, machines=1, nodes=["a"])) == [
        (0, 16, None), (5, 4, ("a",))
    ]  # fmt: skip


def test_points_name_the_nodes_that_are_up_and_a_replaced_node_is_a_change() -> None:
    points = [
        {"time_s": at_s, "gpus": 4 * len(names), "nodes": list(names)}
        for at_s, names in ((0, "ab"), (10, "ab"), (20, "bc"), (30, "abc"))
    ]
    plain = {"points": points, "end_s": 40}
    assert nodes_of(plain) == [
        (0, 8, ("a", "b")), (20, 8, ("b", "c")), (30, 12, ("b", "c", "a"))
    ]  # fmt: skip
    # While the new node boots, and once the loss of the old one is announced, one is up.
    assert nodes_of({**plain, "boot_s": 5, "notice_s": 2}) == [
        (0, 8, ("a", "b")), (18, 4, ("b",)), (25, 8, ("b", "c")), (35, 12, ("b", "c", "a"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (event(5, machines_change=-1, nodes=["x"]), 'loses "x", which is not up'),
        (
            event(5, machines_change=-1, nodes=["a"]) + event(6, machines_change=-1, nodes=["a"]),
            '[[event]] 3: loses "a", which is not up',
        ),
        (event(5, machines_change=-1, nodes=["a", "a"]), 'names "a" twice'),
        (event(5, machines_change=1, nodes=["a"]), 'adds "a", which is up already'),
        (event(5, machines_change=-2, nodes=["a"]), "leaves 2 named nodes with 4 GPUs each, but 4"),
        (event(5, machines_change=-1), "names no nodes, although earlier entries"),
        (event(5, machines=1, nodes="a"), "nodes: is not a list"),
        (event(5, machines=1, nodes=[1]), "nodes: is 1"),
    ],
)
def test_wrong_names_are_mistakes(change: str, told: str) -> None:
    (problem,) = wrong(NAMED + change, ALONE)
    assert told in problem


def test_mistakes_that_follow_from_a_wrong_name_are_not_reported() -> None:
    later = event(6, machines_change=-1, nodes=["b"]) + event(7, machines_change=1)
    (problem,) = wrong(NAMED + event(5, machines_change=-1, nodes=["x"]) + later, ALONE)
    assert '[[event]] 2: loses "x"' in problem


def test_nodes_without_names_before_cannot_be_told_apart() -> None:
    (problem,) = wrong("end_s = 9\n" + event(5, machines_change=-1, nodes=["a"]), ALONE)
    assert 'loses "a", which is not up' in problem
