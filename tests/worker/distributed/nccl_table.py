"""Deaths by phase under NCCL's rules: ``python -m tests.worker.distributed.nccl_table``.

``--without`` switches off what the runtime does about a rule.
"""

from __future__ import annotations

import argparse
from collections import Counter

from tests.worker.distributed.nccl_runs import PHASES, closing_within, run_generation
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import drawn, small_job
from worker.distributed.backends import prepare_environment
from worker.profiling.fault_injection import FailPoint

MEASURES = {
    "eager": "is_eager",
    "at-once": "aborts_at_once",
    "environment": "sets_environment",
    "threads": "enters_threads",
}


def main() -> None:
    """Kill a random rank in each phase of random plans; count what becomes of the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--without", choices=MEASURES, action="append", default=[])
    wishes = parser.parse_args()
    rules = {MEASURES[each]: False for each in wishes.without}
    if "environment" not in wishes.without:
        prepare_environment()
    job, draw = small_job(), drawn("table")
    plans = []
    while len(plans) < wishes.plans:
        plan = any_plan(draw, job, ranks_max=6)
        plans += [plan] if plan.device_count > 1 else []
    print("| phase | deaths | recovered | replaced | lost | named another | context elsewhere |")
    print("|---|---|---|---|---|---|---|")
    for phase in PHASES:
        verdicts: Counter[str] = Counter()
        deaths = wrong = elsewhere = 0
        for plan in plans:
            rank = draw.randrange(plan.device_count)
            step = 0 if phase in {"met", "verified"} else 1
            with closing_within(3.0):
                fail_at = FailPoint(rank, phase, step)
                found = run_generation(job, plan, steps=3, fail_at=fail_at, rules=rules)
            if found[rank].verdict != "dead":
                continue  # This rank has no such phase.
            deaths += 1
            for number, each in enumerate(found):
                if number != rank:
                    verdicts[each.verdict] += 1
                    wrong += each.lost not in {None, rank}
                    elsewhere += bool(each.contexts_elsewhere)
        lost = sum(verdicts.values()) - verdicts["recovered"] - verdicts["replaced"]
        print(
            f"| {phase} | {deaths} | {verdicts['recovered']} | {verdicts['replaced']} | {lost} | "
            f"{wrong} | {elsewhere} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
