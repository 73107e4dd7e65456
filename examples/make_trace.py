"""Makes a trace of machines that come and go at random, for `sailorctl replay`.

Each machine stays up for a while and away for a while; both are drawn from exponential
distributions, so that no event can be predicted. The same seed makes the same trace:

    python examples/make_trace.py --seed 7 > examples/three-zones-trace.toml
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Machines of one pool of three-zones.toml."""

    zone: str
    up_at_first: int
    machines_max: int
    stays_s: float
    """Mean time that a machine stays."""
    away_s: float
    """Mean time until it, or a replacement, is available again."""


KINDS = (
    Kind("us-central1-a", 4, 6, stays_s=3 * 3600, away_s=3600),
    Kind("us-central1-b", 2, 2, stays_s=2 * 3600, away_s=1800),
    Kind("us-west1-a", 2, 2, stays_s=3600, away_s=1200),
)


def changes(chance: random.Random, kind: Kind, end_s: float) -> list[tuple[int, int]]:
    """When machines come (1) and go (-1), in whole seconds."""
    found = []
    for machine in range(kind.machines_max):
        is_up, at_s = machine < kind.up_at_first, 0.0
        while True:
            at_s += chance.expovariate(1 / (kind.stays_s if is_up else kind.away_s))
            if at_s >= end_s:
                break
            is_up = not is_up
            found.append((int(at_s), 1 if is_up else -1))
    return found


def trace(seed: int, hours: float) -> str:
    """The trace as a file."""
    chance = random.Random(seed)
    end_s = int(hours * 3600)
    events = sorted(
        (at_s, kind.zone, change) for kind in KINDS for at_s, change in changes(chance, kind, end_s)
    )
    lines = [
        "# GPUs of three-zones.toml that come and go, drawn by chance: made by",
        f"# python examples/make_trace.py --seed {seed} --hours {hours:g}",
        f"end_s = {end_s}",
    ]
    for at_s, zone, change in events:
        lines += [
            "",
            "[[event]]",
            f"time_s = {at_s}",
            f'zone = "{zone}"',
            f"machines_change = {change}",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print a trace."""
    parser = argparse.ArgumentParser(description="Print a random trace for three-zones.toml.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--hours", type=float, default=8)
    given = parser.parse_args()
    print(trace(given.seed, given.hours), end="")


if __name__ == "__main__":
    main()
