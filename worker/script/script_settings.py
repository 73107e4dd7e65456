"""Does every process's script give the settings that the submitter's gave?

The described job holds most of them; the others travel as one line, long ones as a hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from simulator.spec.job import ParameterGroup


def settings_line(
    groups: Mapping[str, ParameterGroup],
    schedules: Sequence[Sequence[float]],
    **others: object,
) -> str:
    """Return the settings that the described job does not hold; groups are by parameter."""
    # Six digits: processors differ in the last ones of a cosine.
    factors = [[f"{factor:.6g}" for factor in each] for each in schedules]
    parts = [
        f"parameter groups {_hash(sorted(groups.items()))}",
        f"schedules of the learning rate {_hash(factors)}",
        *(f"{name} {value}" for name, value in others.items()),
    ]
    return "; ".join(parts)


def differing(here: str, described: str | None) -> list[tuple[str, str]]:
    """Return the settings of two lines that differ; a line of an earlier version has fewer."""
    pairs = zip(here.split("; "), (described or "").split("; "), strict=False)
    return [(one, other) for one, other in pairs if other and one != other]


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
