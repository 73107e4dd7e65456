"""When a rank requests the inputs of its passes: before it needs them, so that transfers overlap.

Gloo sends nothing before it has heard of the receiver's request, so on CPUs the next input from a
rank is requested as soon as the one before is taken. On GPUs, where a waiting receive holds a part
of the device, only the next pass's input is: while a pass is computed, unless the input depends on
that pass. Else this rank would wait for itself where something waits for the whole device, as the
allocator does before it returns memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from simulator.estimate.pass_order import Op

Requests = tuple[tuple[Op, ...], tuple[Op | None, ...]]
"""Whose inputs are requested before a step, and after the input of each pass arrived."""


def requests_of(
    orders: Sequence[Sequence[Op]],
    group: int,
    *,
    is_early: bool,
    source_of: Callable[[Op], int | None],
) -> Requests:
    """Return the requests of one device group; ``orders`` has the passes of all.

    If early, an input is requested when the one before of the same rank has arrived. ``source_of``
    is the rank that an input comes from; ``None``: it comes from no other rank.
    """
    order = orders[group]
    if not is_early:
        depends_on = passes_needed(orders, group)
        following = (
            None if depends_on.get(maker_of(op), 0) > index else op
            for index, op in enumerate(order[1:])
        )
        return (order[0],), (*following, None)
    by_source: dict[int, list[Op]] = {}
    for op in order:
        source = source_of(op)
        if source is not None:
            by_source.setdefault(source, []).append(op)
    after = {op: following for ops in by_source.values() for op, following in pairwise(ops)}
    return tuple(ops[0] for ops in by_source.values()), tuple(map(after.get, order))


def maker_of(op: Op) -> Op:
    """Return the pass that makes the input of another one."""
    return Op(op.kind, op.stage + (-1 if op.kind == "F" else 1), op.micro_batch)


def passes_needed(orders: Sequence[Sequence[Op]], group: int) -> dict[Op, int]:
    """Return how many of a device group's passes have to be done for each pass of any group."""
    everything = {op for order in orders for op in order}
    needed: dict[Op, int] = {}
    done = [0] * len(orders)
    while len(needed) < len(everything):
        for number, order in enumerate(orders):
            for op in order[done[number] :]:
                maker = maker_of(op)
                if maker in everything and maker not in needed:
                    break
                before = needed[order[done[number] - 1]] if done[number] else 0
                own = done[number] + 1 if number == group else 0
                needed[op] = max(before, needed.get(maker, 0), own)
                done[number] += 1
    return needed
