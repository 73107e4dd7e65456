"""Many lives of the simulated cluster: ``python -m tests.sim --seeds 2000 --first 70001``."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.sim.test_sim import live
from tests.sim.world import GENTLE, Faults


def _lived(seed: int) -> str:
    """What was wrong with a seed's life; empty if nothing."""
    try:
        live(seed, GENTLE if seed % 5 == 0 else Faults())
    except AssertionError as error:
        return str(error)
    return ""


def main() -> int:
    """Print the account of each life that went wrong, and one line in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1)
    wanted = parser.parse_args()
    seeds = range(wanted.first, wanted.first + wanted.seeds)
    broken = []
    with ProcessPoolExecutor() as pool:
        for seed, account in zip(seeds, pool.map(_lived, seeds, chunksize=10), strict=True):
            if account:
                broken.append(seed)
                print(account, flush=True)
    verdict = f"broken: {', '.join(map(str, broken))}" if broken else "clean"
    print(f"{len(seeds)} lives of a cluster, seeds {seeds[0]} to {seeds[-1]}: {verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
