"""The spec of a rank."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import FIRST, GenerationRecord, JobId, NodeId, NodeRecord, Peak, Point
from agents.rpc.signing import ClusterKey
from agents.workers.specs import GenerationDetails, RankMap, WorkerSettings, specs

NODE = NodeRecord(NodeId("a"), "a", "z", "box", "A100-40", 2, "h:1", "ready")
RECORD = GenerationRecord(
    JobId("job"), 1, "open", "plan", (NODE.id,), FIRST, 1, "a test",
    wait_s=77.0, peaks=(Peak(1, 2), Peak(3, 4)),
)  # fmt: skip


def told(tmp_path, record: GenerationRecord, device_bytes: int | None) -> list[dict]:
    settings = WorkerSettings(
        tmp_path, tmp_path, ClusterKey("test", (b"key",)), None, 1.0, 1, device_bytes
    )
    briefing = GenerationDetails(record, "", "", (NODE,), None)
    settings.home(1).mkdir(parents=True)
    return list(specs(settings, briefing, RankMap(2, {0: 0, 1: 1}, None), NODE, {}))


def test_a_spec_holds_the_predicted_peak_and_the_timeout(tmp_path):
    first, second = told(tmp_path, RECORD, 5 << 30)
    assert (first["peak"], second["peak"]) == (
        {"tensors": 1, "context": 2},
        {"tensors": 3, "context": 4},
    )
    assert {spec["wait_s"] for spec in (first, second)} == {77.0}
    assert {spec["device_bytes"] for spec in (first, second)} == {5 << 30}


def test_a_spec_says_which_peers_had_left(tmp_path):
    there, gone = replace(NODE, id=NodeId("b"), name="b"), replace(NODE, id=NodeId("c"), name="c")
    settings = WorkerSettings(tmp_path, tmp_path, ClusterKey("test", (b"key",)), None, 1.0, 1, None)
    details = GenerationDetails(RECORD, "", "", (NODE, there), None, left=(gone,))
    settings.home(1).mkdir(parents=True)
    (spec,) = specs(settings, details, RankMap(1, {0: 0}, None), NODE, {})
    assert {id_: peer["has_left"] for id_, peer in spec["peers"].items()} == {
        "a": False,
        "b": False,
        "c": True,
    }


def test_a_spec_without_predictions_has_no_peak(tmp_path):
    (spec, _) = told(tmp_path, replace(RECORD, peaks=()), None)
    assert (spec["peak"], spec["device_bytes"]) == (None, None)


def test_a_spec_says_to_which_point_a_loss_may_take_the_job_back(tmp_path):
    """Unless the leader is of a version that does not."""
    (spec, _) = told(tmp_path / "new", replace(RECORD, fallback=Point(3, 1)), None)
    assert spec["fallback"] == {"step": 3, "generation": 1}
    (spec, _) = told(tmp_path / "old", RECORD, None)
    assert spec["fallback"] is None
