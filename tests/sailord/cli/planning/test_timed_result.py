"""A search runs in a process of its own, whose time and memory are measured."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from click.testing import CliRunner

from planner.compare.registry import SAILOR
from sailord.cli.main import main
from sailord.cli.planning import compare
from sailord.cli.planning.timed_result import SearchKilled, measured
from tests.sailord.daemon.running import ROOT


def touched(mib: int) -> int:
    """Take memory and give it back; returns who did it."""
    np.ones(mib * 2**17).sum()
    return os.getpid()


def test_each_search_has_its_own_process_and_peak() -> None:
    large, small = measured(lambda: touched(96)), measured(lambda: touched(1))
    assert len({large.result, small.result, os.getpid()}) == 3
    assert large.peak_bytes is not None
    assert small.peak_bytes is not None
    assert 96 * 2**20 <= large.peak_bytes < 140 * 2**20
    assert small.peak_bytes < 40 * 2**20
    assert large.seconds > 0


def test_a_search_that_dies_is_reported() -> None:
    def dies() -> None:
        os._exit(7)

    with pytest.raises(RuntimeError, match="status 7"):
        measured(dies)


def test_a_planner_that_is_killed_leaves_the_others_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(SearchKilled):
        measured(dies)
    monkeypatch.setattr(compare, "plan_job", dies)
    files = (str(ROOT / "examples" / name) for name in ("small.toml", "three-zones.toml"))
    done = CliRunner().invoke(
        main, ["compare", *files, "--planners", f"{SAILOR},varuna", "--whole", "--json"]
    )
    assert done.exit_code == 0, done.output
    ours, other = json.loads(done.output)
    assert "was killed by signal 9 (often: out of memory)" in ours["why_not"]
    assert other["found"]
