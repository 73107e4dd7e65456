"""Lives of a simulated cluster whose processes write as the previous, this and the next version."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from agents.protocol import codec
from tests.chaos.other_version import FIELD, written
from tests.sim.lives import run_life

OF_THE_CONTROL_PLANE = (5, 15, 25)
"""Lives in which sailords and agents are killed again and again: no step may be lost."""
VERSIONS_AT = 15
"""Records until the next process is replaced: an upgrade goes on for as long as the life."""


class Wire:
    """Carries records between processes of which one after the other is replaced."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.carried = dict.fromkeys((-1, 0, 1), 0)

    def __call__(self, value: Any) -> Any:
        if not dataclasses.is_dataclass(value):
            return value
        number = next(self.numbers)
        # Two versions in a row are about at a time, the older one rarer and rarer.
        upgrades, at = divmod(number, VERSIONS_AT)
        older = (-1, 0, 1, 0)[upgrades // VERSIONS_AT % 4]
        newer = (0, 1, 0, -1)[upgrades // VERSIONS_AT % 4]
        version = older if at >= upgrades % VERSIONS_AT else newer
        self.carried[version] += 1
        raw = written(value, version)
        assert (FIELD in raw) == (version > 0)
        read = codec.read(type(value), raw)
        assert read == value
        return read


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("seed", [*OF_THE_CONTROL_PLANE, 1, 2, 10])
def test_mixed_versions_lose_no_step(seed: int) -> None:
    wire = Wire()
    mixed = run_life(seed, wire)
    assert all(wire.carried.values()), wire.carried
    assert mixed.checker.account() == run_life(seed).checker.account()
