"""Checks before training that all ranks begin alike: with the same data, settings and model.

A script may list a folder in the order of its disk, or shuffle without a seed. Then one stage would
compute the loss with other labels than those of its inputs, and pipelines would train on some
samples twice and on others never. It may give other parameter groups or schedules on one machine.
So the ranks compare one sample, and digests of the script's settings, before they train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from simulator.documents.problems import InputError, Problem
from simulator.spec.plan import Plan
from worker.distributed.interface import Collective, TransportError
from worker.layout.rank_layout import rank_places


def check_same_start(
    sample: int | None,
    step: int,
    settings: Mapping[str, int],
    group: Collective,
    plan: Plan,
    device: torch.device,
) -> None:
    """Raise ``InputError`` on all ranks if two differ in the first sample of a step or a setting.

    A collective; ``sample`` is the digest of this rank's sample, ``None`` if it loads none.
    """
    own = torch.zeros(1 + len(settings), group.size, dtype=torch.int64)
    own[:, group.index] = torch.tensor([-1 if sample is None else sample, *settings.values()]) + 1
    found = group.read_sum(own.flatten().to(device))
    rows = [found[first : first + group.size] for first in range(0, len(found), group.size)]
    for name, row in zip([None, *settings], rows, strict=True):
        if (odd := _find_two_that_differ(row)) is None:
            continue
        # The first rank that fails aborts the others, so none may fail before all know as much.
        with suppress(TransportError):
            group.read_sum(torch.zeros(1, device=device))
        here, there = (_name_rank(rank, plan) for rank in odd)
        if name is None:
            what = f"{here} and {there} load different samples: the first of step {step} differs"
            cure = "sort what folders list (glob, os.listdir), seed each generator, use equal files"
            raise InputError(Problem("data", what, cure))
        what = f"gives {here} and {there} different settings: {name}"
        cure = "do not compute them from the machine, the time or random numbers"
        raise InputError(Problem("script", what, cure))


def _find_two_that_differ(row: Sequence[float]) -> tuple[int, int] | None:
    """Return two ranks whose digests differ; 0 stands for none."""
    first = {each: rank for rank, each in reversed(list(enumerate(row))) if each > 0}
    if len(first) <= 1:
        return None
    here, there = sorted(first.values())[:2]
    return here, there


def _name_rank(rank: int, plan: Plan) -> str:
    place = rank_places(plan)[rank]
    node = plan.pipelines[place.pipeline].stages[place.stage].places[0].node
    return f"rank {rank}" + (f" on {node}" if node else "")
