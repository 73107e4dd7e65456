"""Many lives of the simulated cluster: ``python -m tests.sim --seeds 2000 --first 70001``.

With ``--sharing 3`` three jobs share it.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.sim.lives import run_life


def _lived(seed: int, sharing: int) -> tuple[int, int, str]:
    """Return generations and checkpoints of one life, and its failure; empty if there is none."""
    try:
        checker = run_life(seed, sharing=sharing).checker
    except AssertionError as error:
        return 0, 0, str(error)
    return len(checker.opened), checker.commits, ""


def main() -> int:
    """Print the account of each life that failed, and a summary line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--sharing", type=int, default=0)
    wanted = parser.parse_args()
    seeds = range(wanted.first, wanted.first + wanted.seeds)
    broken: list[int] = []
    generations = commits = 0
    began = time.monotonic()
    with ProcessPoolExecutor() as pool:
        lives = zip(
            seeds, pool.map(_lived, seeds, repeat(wanted.sharing), chunksize=10), strict=True
        )
        for seed, (opened, committed, account) in lives:
            generations += opened
            commits += committed
            if account:
                broken.append(seed)
                print(account, flush=True)
    verdict = f"broken: {', '.join(map(str, broken))}" if broken else "clean"
    took = f"{generations} generations, {commits} checkpoints, {time.monotonic() - began:.0f} s"
    print(f"{len(seeds)} lives of a cluster, seeds {seeds[0]} to {seeds[-1]}, {took}: {verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
