"""A search runs in a process of its own, whose time and memory are measured."""

from __future__ import annotations

import os

import numpy as np
import pytest

from sailord.cli.planning.measured import measured


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


def test_a_search_that_dies_is_told() -> None:
    def dies() -> None:
        os._exit(7)

    with pytest.raises(RuntimeError, match="status 7"):
        measured(dies)
