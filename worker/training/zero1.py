"""ZeRO-1: of each part of the model one holder keeps the optimizer's moments and moves the weights.

Gradients are summed as ever. Then the owner of a part updates it and sends the weights to the
others that hold it, who have no moments for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.distributed.interface import Collective, Transport
from worker.layout.rank_layout import Holdings, Part, all_parts
from worker.training.flat_buffers import LayerMemory
from worker.training.optimizer import Update


def owned_parts(holdings: Holdings, rank: int, *, zero: int) -> tuple[Part, ...]:
    """The parts of which a rank keeps the moments: with ZeRO-1 its own, else all that it holds."""
    return tuple(
        part for part in all_parts(holdings) if (part.owner == rank if zero else rank in part.ranks)
    )


class OwnersUpdate:
    """One rank's part in a step in which only owners update."""

    def __init__(
        self,
        rank: int,
        holdings: Holdings,
        memories: Mapping[int, LayerMemory],
        transport: Transport,
    ) -> None:
        self._rank = rank
        self._memories = memories
        self._parts: list[tuple[Part, Collective | None]] = [
            (part, transport.group(part.ranks) if len(part.ranks) > 1 else None)
            for part in all_parts(holdings)
            if rank in part.ranks
        ]

    def apply(self, update: Update) -> None:
        """Update what this rank owns, and take from the other owners what they have updated."""
        under_way = []
        for part, group in self._parts:
            memory = self._memories[part.layer]
            weights = memory.part_of(memory.master, part)
            if part.owner == self._rank:
                moments = tuple(memory.part_of(moment, part) for moment in memory.moments)
                update.apply(weights, memory.part_of(memory.gradient, part), moments)
                memory.put_part(memory.master, part, weights)
                for kept, values in zip(memory.moments, moments, strict=True):
                    memory.put_part(kept, part, values)
            if group is not None:
                source = part.ranks.index(part.owner)
                under_way.append((part, weights, group.start_broadcast(weights, source=source)))
        for part, weights, pending in under_way:
            pending.wait()
            memory = self._memories[part.layer]
            memory.put_part(memory.master, part, weights)
