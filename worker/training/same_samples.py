"""Do all ranks see the same samples? Each reads its own copy of the data, in an order of its own.

A script may list a folder in the order of its disk, or shuffle without a seed. Then one stage would
compute the loss with other labels than those of its inputs, and pipelines would train on some
samples twice and on others never. So the ranks compare one sample before they train.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from simulator.documents.problems import InputError, Problem
from simulator.spec.plan import Plan
from worker.distributed.interface import Collective, TransportError
from worker.layout.rank_layout import rank_places


def check_same_sample(
    digest: int | None, step: int, group: Collective, plan: Plan, device: torch.device
) -> None:
    """Raise ``InputError`` on all ranks if two of them loaded another first sample of a step.

    A collective; ``digest`` is that of this rank's sample, ``None`` if it loads none.
    """
    own = torch.zeros(group.size, dtype=torch.int64)
    if digest is not None:
        own[group.index] = digest + 1
    found = [each - 1 for each in group.read_sum(own.to(device))]
    first = {each: rank for rank, each in reversed(list(enumerate(found))) if each >= 0}
    if len(first) <= 1:
        return
    # The first rank that fails aborts the others, so none may fail before all know as much.
    with suppress(TransportError):
        group.read_sum(torch.zeros(1, device=device))
    here, there = sorted(first.values())[:2]
    what = (
        f"{_named(here, plan)} and {_named(there, plan)} load different samples: the first of step"
        f" {step} differs"
    )
    cure = "sort what folders list (glob, os.listdir), seed each generator, use equal files"
    raise InputError(Problem("data", what, cure))


def _named(rank: int, plan: Plan) -> str:
    place = rank_places(plan)[rank]
    node = plan.pipelines[place.pipeline].stages[place.stage].places[0].node
    return f"rank {rank}" + (f" on {node}" if node else "")
