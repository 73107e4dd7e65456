"""A short storm over a sailord that rents, with a real Prometheus beside it."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.ledger_storm import MUST_FIRE, LedgerStorm, Result

CALM = Result(
    seconds=60.0,
    faults=Counter(instance=1),
    instances=2,
    bill_gpu_s=100.0,
    bill_usd=1.0,
    ledger={
        "causes": [{"cause": "training", "gpu_s": 100.05, "usd": 1.001}],
        "ahead_gpu_s": 0.0,
        "ahead_usd": 0.0,
    },
    scraped_gpu_s={"training": 100.05},
    scraped_usd={"training": 1.001},
    shrunk={},
    targets={"n:1": ""},
    broken_rules={},
    prometheus={},
    fired=frozenset(MUST_FIRE),
)

FAULTS = ((0.5, "workers"), (2.0, "instance"), (0.7, "sailord"))
"""Each fault after a pause in seconds. sailord is killed just after one of two instances ended, and
trains on without another one: to choose it takes a planner in the background a minute on a busy
machine."""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"bill_gpu_s": 99.9}, ["100.050 GPU s on causes, 99.900 on the bill"]),
        ({"bill_usd": 1.02}, ["$1.0010 on causes, $1.0200 on the bill"]),
        ({"scraped_usd": {}}, ["training: usd 1.001, scraped 0.0"]),
        ({"shrunk": {"x": 2.0}}, ["x shrank 2 times"]),
        ({"targets": {"n:1": "refused"}}, ["target n:1: refused"]),
        ({"broken_rules": {"A": "parse"}}, ["rule A: parse"]),
        ({"prometheus": {"failures": 2.0}}, ["failures is 2"]),
        ({"fired": frozenset()}, ["SailorRefusedRequests did not fire"]),
        ({"fired": frozenset({*MUST_FIRE, "SailorNoLeader"})}, ["SailorNoLeader fired"]),
    ],
)
def test_each_disagreement_is_reported(changed: dict[str, Any], said: list[str]) -> None:
    assert replace(CALM, **changed).problems() == said


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus in the PATH")
@pytest.mark.at_length
@pytest.mark.chaos
def test_ledger_bill_and_a_real_prometheus_agree_over_a_storm(tmp_path: Path) -> None:
    storm = LedgerStorm(tmp_path, random.Random(1), machines=1)
    result = storm.run(FAULTS)
    assert result.problems() == []
    assert len(result.targets) >= 3
    assert result.faults.total() == len(FAULTS)
