"""What planners propose: their micro batch sizes, and plans in order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from planner.compare.interface import ProposedPlan
from simulator.inputs.plan_file import plan_text
from simulator.spec.job import Job
from simulator.spec.plan import Plan


def micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """The sizes to try: those of the job, else 1 to 8, that divide the global batch."""
    sizes = job.micro_batches if job.micro_batches is not None else (1, 2, 4, 8)
    return tuple(size for size in sorted(sizes) if job.global_batch % size == 0)


def proposal(seconds: float, plan: Plan | str) -> ProposedPlan:
    """A proposal of a plan, or the reason why there is none."""
    return (
        ProposedPlan(seconds, None, plan) if isinstance(plan, str) else ProposedPlan(seconds, plan)
    )


def ranked(proposals: Iterable[tuple[int, ProposedPlan]]) -> list[ProposedPlan]:
    """Proposals best first; ties go to fewer GPUs, then by the plan's text.

    Each comes with its number of GPUs, which also counts where there is no plan.
    """

    def score(found: tuple[int, ProposedPlan]) -> tuple[float, int]:
        return found[1].seconds, found[0]

    def written(found: tuple[int, ProposedPlan]) -> str:
        plan = found[1].plan
        return found[1].why_not if plan is None else plan_text(plan)

    best: list[ProposedPlan] = []
    for _, equals in groupby(sorted(proposals, key=score), key=score):
        alike = list(equals)
        if len(alike) > 1:  # Large plans are long to write, and ties are few.
            alike.sort(key=written)
        best.extend(found for _, found in alike)
    return best
