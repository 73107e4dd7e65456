"""The order of passes on each device: 1F1B, GPipe, interleaved 1F1B, and zero-bubble (ZB-H1).

ZB-H1 (Qi et al., ICLR 2024) divides the backward of a micro batch: the gradient of the inputs, for
which the stage before waits, and that of the weights, which may follow later. A stage with ``s``
stages before it postpones ``s`` of the latter, which then fill the wait at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.spec.plan import Schedule


@dataclass(frozen=True, slots=True)
class Op:
    """One pass of one micro batch through one stage."""

    kind: str
    """``"F"``, ``"B"``, or, where the backward is divided, ``"W"`` for the gradient of weights."""
    stage: int
    micro_batch: int


def device_orders(
    schedule: Schedule, *, stages: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Op]]:
    """Return the passes of each device group in the order of execution."""
    if schedule == "zero-bubble":
        return [_zero_bubble(stage, stages, micro_batches) for stage in range(stages)]
    if schedule == "interleaved":
        n = stages // virtual_stages
        return [_interleave(device, n, virtual_stages, micro_batches) for device in range(n)]
    return [
        _alternate(
            [Op("F", stage, m) for m in range(micro_batches)],
            [Op("B", stage, m) for m in range(micro_batches)],
            micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches),
        )
        for stage in range(stages)
    ]


def _alternate(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Warm-up forwards, then one forward and one backward in turn, then the other backwards."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _zero_bubble(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """1F1B's order, in which the gradient of the weights comes ``stage`` micro batches later."""
    order = []
    for op in device_orders("1f1b", stages=stages, micro_batches=micro_batches)[stage]:
        order.append(op)
        if op.kind == "B" and op.micro_batch >= stage:
            order.append(Op("W", stage, op.micro_batch - stage))
    left = range(max(micro_batches - stage, 0), micro_batches)
    return order + [Op("W", stage, m) for m in left]


def _interleave(device: int, devices: int, chunks: int, micro_batches: int) -> list[Op]:
    """Return Megatron's order: rounds of ``devices`` micro batches, chunk after chunk."""
    total = micro_batches * chunks

    def unit(index: int, *, backward: bool) -> Op:
        chunk = (index % (devices * chunks)) // devices
        if backward:
            chunk = chunks - 1 - chunk
        micro_batch = (index // (devices * chunks)) * devices + index % devices
        return Op("B" if backward else "F", chunk * devices + device, micro_batch)

    forwards = [unit(index, backward=False) for index in range(total)]
    backwards = [unit(index, backward=True) for index in range(total)]
    if micro_batches == devices:
        warm_up = total
    else:
        warm_up = min((devices - device - 1) * 2 + (chunks - 1) * devices, total)
    return _alternate(forwards, backwards, warm_up)


HeldCounts = tuple[int, ...]
"""Micro batches whose activations a device group holds, per stage that it runs. For zero-bubble:
those held in full, and those of which only the gradient of weights is missing."""


def held_at_most(
    schedule: Schedule, *, device: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[HeldCounts, ...]:
    """Return the activations that a device group holds at each moment that can be its peak.

    With one stage there is one such moment. With several, the stages peak at different moments,
    and which one is the peak depends on their sizes.
    """
    if schedule == "gpipe":
        return ((micro_batches,),)
    if schedule == "1f1b":
        return ((min(micro_batches, stages - device),),)
    seen: set[HeldCounts] = set()
    if schedule == "zero-bubble":
        full, divided = 0, 0
        for op in _zero_bubble(device, stages, micro_batches):
            full += {"F": 1, "B": -1, "W": 0}[op.kind]
            divided += {"F": 0, "B": 1, "W": -1}[op.kind]
            seen.add((full, divided))
    else:
        devices = stages // virtual_stages
        held = [0] * virtual_stages
        for op in _interleave(device, devices, virtual_stages, micro_batches):
            held[op.stage // devices] += 1 if op.kind == "F" else -1
            seen.add(tuple(held))
    return tuple(sorted(one for one in seen if not any(_exceeds(other, one) for other in seen)))


def _exceeds(one: HeldCounts, other: HeldCounts) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
