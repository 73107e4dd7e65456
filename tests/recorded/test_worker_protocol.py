"""Specs and orders of every number so far are what workers and fork servers act on.

``worker_protocol/N`` holds what agents of number N told them. The files are written once, with
SAILOR_RETELL=1, and never again: workers of an earlier agent keep running.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.records import FIRST, GenerationRecord, JobId, NodeId, NodeRecord, Peak
from agents.rpc.enrolment import worker_tls
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import TlsFiles
from agents.workers.process import join_order
from agents.workers.specs import GenerationDetails, RankMap, WorkerSettings, specs
from sailord.authority import Authority
from worker.control.assignment import Assignment
from worker.spec_protocol import NEEDS, SPEAKS

HERE = Path(__file__).parent / "worker_protocol"
NUMBERS = range(max(NEEDS, 1), SPEAKS + 1)
NODE = NodeRecord(NodeId("a.1.1"), "a", "z", "box", "A100-40", 2, "127.0.0.1:1", "ready")
PEER = NodeRecord(NodeId("b.1.1"), "b", "z", "box", "A100-40", 2, "127.0.0.1:2", "ready")
RECORD = GenerationRecord(
    JobId("job"), 2, "open", "plan", (NODE.id, PEER.id), FIRST, 1, "a test", peaks=(Peak(1, 2),)
)


def present(folder: Path) -> dict[str, Any]:
    """What this version tells a worker."""
    settings = WorkerSettings(
        folder, folder, ClusterKey("test", (b"key",)), None, 1.0, 1, 1 << 30,
        worker_tls(TlsFiles(folder / "ca" / "ca.pem"), "test"),
        lambda job, manifest: f"/v1/checkpoint/{job}/mac/{manifest}",
    )  # fmt: skip
    settings.home(2).mkdir(parents=True)
    details = GenerationDetails(RECORD, "", "", (NODE, PEER), None)
    (spec,) = specs(settings, details, RankMap(2, {0: 0}, NODE.id), NODE, {"folder": "/x"})
    return spec


def keys_of(value: Any, at: str = "") -> set[str]:
    """The keys of a value, at every depth."""
    if not isinstance(value, dict):
        return set()
    return {f"{at}/{key}" for key in value} | {
        found for key, each in value.items() for found in keys_of(each, f"{at}/{key}")
    }


def test_this_number_is_on_record(tmp_path):
    folder = HERE / str(SPEAKS)
    if os.environ.get("SAILOR_RETELL") and not folder.exists():
        folder.mkdir(parents=True)
        text = json.dumps(present(tmp_path), indent=1, sort_keys=True)
        text = text.replace(str(tmp_path), "/state")
        (folder / "spec.json").write_text(f"{text}\n")
    assert sorted(int(each.name) for each in HERE.iterdir()) == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_workers_act_on_recorded_specs(number, tmp_path):
    Authority.create(tmp_path / "ca", "test")
    text = (HERE / str(number) / "spec.json").read_text().replace("/state", str(tmp_path))
    spec = json.loads(text)
    for told in (spec, {**spec, "new": [1]}, {k: v for k, v in spec.items() if k != "needs"}):
        assignment = Assignment(told)
        assert (assignment.job, assignment.generation, assignment.rank) == ("job", 2, 0)
        assert assignment.sources() == []
        told["restore"]["source"] = "memory"
        assert [len(group) for group in Assignment(told).sources()] == [1, 1, 0]
        told["restore"]["source"] = "start"  # It is one and the same in all three.


@pytest.mark.parametrize("number", NUMBERS)
def test_workers_of_a_recorded_number_find_every_key_in_todays_specs(number, tmp_path):
    """An agent may add keys, but take one away only with a new number that workers need."""
    then = json.loads((HERE / str(number) / "spec.json").read_text())
    now = present(tmp_path)
    assert keys_of(then) <= keys_of(now)
    assert join_order(now).keys() == {"order", "generation", "spec"}


def test_a_worker_refuses_what_it_is_too_old_for(tmp_path):
    spec = present(tmp_path) | {"needs": SPEAKS + 1}
    with pytest.raises(ValueError, match=rf"speak protocol {SPEAKS}, and its agent needs .*drain"):
        Assignment(spec)
