"""How FlashFlex divides a machine's GPUs into TP groups, and layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.baselines.flashflex.cost import (
    FlashFlexInputs,
    FlashFlexPipeline,
    memory_gb,
    pipeline_seconds,
)
from planner.compare.interface import Mode

MENU: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    3: ((2, 1), (1, 1, 1)),
    4: ((4,), (2, 2), (2, 1, 1)),
    5: ((4, 1), (2, 2, 1)),
    6: ((4, 2), (2, 2, 2)),
    7: ((4, 2, 1), (2, 2, 2, 1)),
    8: ((8,), (4, 4), (4, 2, 2)),
}
"""TP groups that a number of GPUs of a machine may form."""


def tp_groups(
    inputs: FlashFlexInputs,
    group: Sequence[int],
    micro_batches: int,
    *,
    mode: Mode = "fixed",
    widest: bool = False,
) -> list[tuple[int, ...]]:
    """The best division of each machine's devices, if a pipeline of just them ran all layers."""
    machines: dict[int, list[int]] = {}
    for device in group:
        machines.setdefault(inputs.devices[device].machine, []).append(device)
    found: list[tuple[int, ...]] = []
    most = max(MENU)
    for _, members in sorted(machines.items()):
        if len(members) > most and mode == "published":
            return []  # The defect: the menu ends at eight GPUs.
        for first in range(0, len(members), most):
            found += _choose_from_menu(
                inputs, members[first : first + most], micro_batches, widest=widest
            )
    return found


def _choose_from_menu(
    inputs: FlashFlexInputs, members: Sequence[int], micro_batches: int, *, widest: bool
) -> tuple[tuple[int, ...], ...]:
    menu = [sizes for sizes in MENU[len(members)] if set(sizes) <= set(inputs.tp_degrees)]
    best = None
    menu = menu or [(1,) * len(members)]
    for sizes in menu[:1] if widest else menu:
        ends = accumulate(sizes, initial=0)
        stages = tuple(tuple(members[first:end]) for first, end in pairwise(ends))
        layers = split_layers(inputs, stages, mode="published")
        assert layers is not None, "only fixed plans refuse empty stages"
        seconds = pipeline_seconds(inputs, FlashFlexPipeline(stages, layers), micro_batches)
        if best is None or seconds < best[0]:
            best = (seconds, stages)
    assert best is not None, "a menu has at least one entry"
    return best[1]


def split_layers(
    inputs: FlashFlexInputs, stages: Sequence[Sequence[int]], *, mode: Mode
) -> tuple[int, ...] | None:
    """Blocks in proportion to memory; the remainder goes by decreasing memory.

    ``published`` leaves small stages empty; ``fixed`` takes from the largest, if there are enough
    blocks.
    """
    memory = [memory_gb(inputs, group) for group in stages]
    total = inputs.layers
    counts = [int(total * mine / sum(memory) + 1e-9) for mine in memory]
    # Among equals the later stage comes first.
    order = sorted(range(len(stages)), key=lambda i: (-memory[i], -i))
    for turn in range(total - sum(counts)):
        counts[order[turn % len(order)]] += 1
    if mode == "fixed":
        if len(stages) > total:
            return None
        for stage in range(len(stages)):
            if counts[stage] == 0:
                counts[max(range(len(stages)), key=lambda i: counts[i])] -= 1
                counts[stage] = 1
    return tuple(counts)
