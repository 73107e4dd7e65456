"""ZeRO-1: one holder of each bucket keeps the optimizer's moments and updates the weights.

The owner of a bucket gets the sum of its gradients (``gradient_sync``), updates the weights and
broadcasts them to the other holders, which keep no moments for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.distributed.interface import Collective, Transport
from worker.layout.rank_layout import Bucket, Holdings, all_buckets
from worker.training.flat_buffers import LayerBuffer
from worker.training.optimizer import GroupsOf, OptimizerStep


def owned_buckets(holdings: Holdings, rank: int, *, zero: int) -> tuple[Bucket, ...]:
    """Return the buckets whose moments a rank keeps: its own with ZeRO-1, else all it holds."""
    return tuple(
        bucket
        for bucket in all_buckets(holdings)
        if (bucket.owner == rank if zero else rank in bucket.ranks)
    )


class Zero1Update:
    """One rank's part in an optimizer step in which only owners update."""

    def __init__(
        self,
        rank: int,
        holdings: Holdings,
        buffers: Mapping[int, LayerBuffer],
        transport: Transport,
        groups_of: GroupsOf,
    ) -> None:
        self._groups_of = groups_of
        self._rank = rank
        self._buffers = buffers
        self._buckets: list[tuple[Bucket, Collective | None]] = [
            (bucket, transport.group(bucket.ranks) if len(bucket.ranks) > 1 else None)
            for bucket in all_buckets(holdings)
            if rank in bucket.ranks
        ]

    def apply(self, update: OptimizerStep) -> None:
        """Update the buckets that this rank owns, and receive the others from their owners."""
        under_way = []
        for bucket, group in self._buckets:
            buffer = self._buffers[bucket.layer]
            weights = buffer.gather_bucket(buffer.master, bucket)
            if bucket.owner == self._rank:
                moments = tuple(buffer.gather_bucket(moment, bucket) for moment in buffer.moments)
                update.apply_by_group(
                    self._groups_of(bucket.layer, buffer.bucket_slots(bucket), weights.numel()),
                    weights,
                    buffer.gather_bucket(buffer.gradient, bucket),
                    moments,
                )
                buffer.scatter_bucket(buffer.master, bucket, weights)
                for kept, values in zip(buffer.moments, moments, strict=True):
                    buffer.scatter_bucket(kept, bucket, values)
            if group is not None:
                source = bucket.ranks.index(bucket.owner)
                under_way.append((bucket, weights, group.start_broadcast(weights, source=source)))
        for bucket, weights, pending in under_way:
            pending.wait()
            buffer = self._buffers[bucket.layer]
            buffer.scatter_bucket(buffer.master, bucket, weights)
