"""ZeRO-1: of each part of the model one holder keeps the optimizer's moments and moves the weights.

Gradients are summed as ever. Then the owner of a part updates it and sends the weights to the
others that hold it, who have no moments for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.distributed.interface import Collective, Transport
from worker.layout.rank_layout import Bucket, Holdings, all_buckets
from worker.training.flat_buffers import LayerBuffer
from worker.training.optimizer import OptimizerStep


def owned_buckets(holdings: Holdings, rank: int, *, zero: int) -> tuple[Bucket, ...]:
    """The parts of which a rank keeps the moments: with ZeRO-1 its own, else all that it holds."""
    return tuple(
        part
        for part in all_buckets(holdings)
        if (part.owner == rank if zero else rank in part.ranks)
    )


class Zero1Update:
    """One rank's part in a step in which only owners update."""

    def __init__(
        self,
        rank: int,
        holdings: Holdings,
        buffers: Mapping[int, LayerBuffer],
        transport: Transport,
    ) -> None:
        self._rank = rank
        self._buffers = buffers
        self._parts: list[tuple[Bucket, Collective | None]] = [
            (part, transport.group(part.ranks) if len(part.ranks) > 1 else None)
            for part in all_buckets(holdings)
            if rank in part.ranks
        ]

    def apply(self, update: OptimizerStep) -> None:
        """Update what this rank owns, and take from the other owners what they have updated."""
        under_way = []
        for part, group in self._parts:
            buffer = self._buffers[part.layer]
            weights = buffer.gather_bucket(buffer.master, part)
            if part.owner == self._rank:
                moments = tuple(buffer.gather_bucket(moment, part) for moment in buffer.moments)
                update.apply(weights, buffer.gather_bucket(buffer.gradient, part), moments)
                buffer.scatter_bucket(buffer.master, part, weights)
                for kept, values in zip(buffer.moments, moments, strict=True):
                    buffer.scatter_bucket(kept, part, values)
            if group is not None:
                source = part.ranks.index(part.owner)
                under_way.append((part, weights, group.start_broadcast(weights, source=source)))
        for part, weights, pending in under_way:
            pending.wait()
            buffer = self._buffers[part.layer]
            buffer.scatter_bucket(buffer.master, part, weights)
