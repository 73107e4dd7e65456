"""Deaths by phase under NCCL's rules: ``python -m tests.worker.distributed.nccl_table``."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.worker.distributed.nccl_runs import PHASES, closing_within, run_generation
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import drawn, small_job
from worker.distributed.backends import prepare_environment
from worker.profiling.fault_injection import FailPoint


def main() -> None:
    """Kill a random rank in each phase of random plans; count what becomes of the others."""
    prepare_environment()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--plans", type=int, default=10)
    wishes = parser.parse_args()
    job, draw = small_job(), drawn("table")
    plans = []
    while len(plans) < wishes.plans:
        plan = any_plan(draw, job, ranks_max=6)
        plans += [plan] if plan.device_count > 1 else []
    print("| phase | deaths | survivors recovered | replaced | lost | named another |")
    print("|---|---|---|---|---|---|")
    for phase in PHASES:
        verdicts: Counter[str] = Counter()
        deaths = wrong = 0
        for plan in plans:
            rank = draw.randrange(plan.device_count)
            step = 0 if phase in {"met", "verified"} else 1
            with closing_within(3.0):
                found = run_generation(job, plan, steps=3, fail_at=FailPoint(rank, phase, step))
            if found[rank].verdict != "dead":
                continue  # This rank has no such phase.
            deaths += 1
            for number, each in enumerate(found):
                if number != rank:
                    verdicts[each.verdict] += 1
                    wrong += each.lost not in {None, rank}
        lost = sum(verdicts.values()) - verdicts["recovered"] - verdicts["replaced"]
        print(
            f"| {phase} | {deaths} | {verdicts['recovered']} | {verdicts['replaced']} | {lost} | "
            f"{wrong} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
