"""Digests of a script's settings that the described job does not hold, for ranks to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from simulator.spec.job import ParameterGroup


def settings_digests(
    groups: Mapping[str, ParameterGroup],
    schedules: Sequence[Sequence[float]],
    **others: object,
) -> dict[str, int]:
    """Return a digest for each setting by its name; groups are by parameter."""
    # Processors differ in the last digits of a cosine.
    factors = [[round(factor, 6) + 0.0 for factor in each] for each in schedules]
    settings = {"parameter groups": sorted(groups.items()), "learning rate schedules": factors}
    return {name: _digest(value) for name, value in {**settings, **others}.items()}


def _digest(value: object) -> int:
    found = hashlib.blake2b(repr(value).encode(), digest_size=6).digest()
    return int.from_bytes(found, "big")
