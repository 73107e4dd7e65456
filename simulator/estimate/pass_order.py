"""The order of forwards and backwards on each device: 1F1B, GPipe and interleaved 1F1B."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.spec.plan import Schedule


@dataclass(frozen=True, slots=True)
class Op:
    """One forward or backward of one micro batch through one stage."""

    kind: str
    """``"F"`` or ``"B"``."""
    stage: int
    micro_batch: int


def device_orders(
    schedule: Schedule, *, stages: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Op]]:
    """Return the forwards and backwards of each device group in the order of execution."""
    if schedule == "interleaved":
        n = stages // virtual_stages
        return [_interleaved(device, n, virtual_stages, micro_batches) for device in range(n)]
    return [
        _alternating(
            [Op("F", stage, m) for m in range(micro_batches)],
            [Op("B", stage, m) for m in range(micro_batches)],
            micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches),
        )
        for stage in range(stages)
    ]


def _alternating(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Warm-up forwards, then one forward and one backward in turn, then the other backwards."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _interleaved(device: int, devices: int, chunks: int, micro_batches: int) -> list[Op]:
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
    return _alternating(forwards, backwards, warm_up)


Held = tuple[int, ...]
"""Number of micro batches whose activations a device group holds, per stage that it runs."""


def held_at_most(
    schedule: Schedule, *, device: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[Held, ...]:
    """Return the activations that a device group holds at each moment that can be its peak.

    With one stage there is one such moment. With several, the stages peak at different moments,
    and which one is the peak depends on their sizes.
    """
    if schedule == "gpipe":
        return ((micro_batches,),)
    if schedule == "1f1b":
        return ((min(micro_batches, stages - device),),)
    devices = stages // virtual_stages
    held = [0] * virtual_stages
    seen: set[Held] = set()
    for op in _interleaved(device, devices, virtual_stages, micro_batches):
        held[op.stage // devices] += 1 if op.kind == "F" else -1
        seen.add(tuple(held))
    return tuple(sorted(one for one in seen if not any(_exceeds(other, one) for other in seen)))


def _exceeds(one: Held, other: Held) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
