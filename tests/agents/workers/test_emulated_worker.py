"""The emulated worker reports a lost source of its state as the real one does."""

from __future__ import annotations

import socket

import pytest

from agents.protocol.records import NodeId
from simulator.inputs.plan_file import plan_text
from tests.agents.running import JOB, JOB_FILE, plan_on
from tests.fakes.worker import Part
from tests.fakes.worker_state import share_of


@pytest.mark.parametrize(("has_left", "taking"), [(False, "broken"), (True, "failed")])
def test_a_source_that_died_while_state_was_fetched_is_named(tmp_path, has_left, taking):
    (tmp_path / "plan.json").write_text(plan_text(plan_on(NodeId("b"))))
    (tmp_path / "job.toml").write_text(JOB_FILE)
    (tmp_path / "0").mkdir()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        at = "{}:{}".format(*silent.getsockname())
        spec = {
            "job": JOB, "generation": 2, "rank": 0, "node": "b", "host": "b", "ticket": "",
            "folder": str(tmp_path / "0"), "memory": str(tmp_path / "memory"),
            "restore": {"source": "memory", "generation": 1, "step": 5},
            "peers": {"a": {"address": at, "zone": "", "has_left": has_left}, "b": {}},
        }  # fmt: skip
        part = Part(spec, 5, share_of(spec))
        part.begin()
    status = part.status()
    assert status["taking"] == taking
    assert status["broken_peers"] == ([] if has_left else ["a"])
    assert status["failure"].startswith("no node has pieces")
