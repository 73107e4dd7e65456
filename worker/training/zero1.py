"""ZeRO-1: one holder of each bucket keeps the optimizer's moments and updates the weights.

The owner of a bucket gets the sum of its gradients (``gradient_sync``), updates the weights and
broadcasts them to the other holders, which keep no moments for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.distributed.interface import Collective, PendingOperation, Transport
from worker.layout.rank_layout import Bucket, Holdings, all_buckets
from worker.training.bucket_copies import COPIES_BYTES_MAX, wait_until_done
from worker.training.flat_buffers import LayerBuffer
from worker.training.optimizer import GroupsOf, OptimizerStep


def owned_buckets(holdings: Holdings, rank: int, *, zero: int) -> tuple[Bucket, ...]:
    """Return the buckets whose moments a rank keeps: its own with ZeRO-1, else all it holds."""
    return tuple(
        bucket
        for bucket in all_buckets(holdings)
        if (bucket.owner == rank if zero else rank in bucket.ranks)
    )


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """Weights that are on their way."""

    bucket: Bucket
    weights: Tensor
    pending: PendingOperation
    copied_bytes: int
    """The bytes of the weights if they are a copy of the buffer; else 0."""


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
        self._buffers, self._transport = buffers, transport
        self._buckets: list[tuple[Bucket, Collective | None]] = [
            (bucket, transport.group(bucket.ranks) if len(bucket.ranks) > 1 else None)
            for bucket in all_buckets(holdings)
            if rank in bucket.ranks
        ]

    def apply(self, update: OptimizerStep) -> None:
        """Update the buckets that this rank owns, and receive the others from their owners."""
        under_way: deque[_Broadcast] = deque()
        held = 0
        for bucket, group in self._buckets:
            buffer = self._buffers[bucket.layer]
            copied = buffer.copied_bytes(bucket)
            while copied and under_way and copied + held > COPIES_BYTES_MAX:
                oldest = under_way.popleft()
                if oldest.copied_bytes:
                    wait_until_done(oldest.pending, self._transport)
                held -= oldest.copied_bytes
                self._end(oldest)
                del oldest  # Its memory is that of the next one.
            held += copied if group is not None else 0
            weights = buffer.gather_bucket(buffer.master, bucket)
            if bucket.owner == self._rank:
                self._update(bucket, weights, update)
            if group is not None:
                source = bucket.ranks.index(bucket.owner)
                pending = group.start_broadcast(weights, source=source)
                under_way.append(_Broadcast(bucket, weights, pending, copied))
            del weights
        while under_way:
            self._end(under_way.popleft())

    def _update(self, bucket: Bucket, weights: Tensor, update: OptimizerStep) -> None:
        buffer = self._buffers[bucket.layer]
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

    def _end(self, each: _Broadcast) -> None:
        each.pending.wait()
        buffer = self._buffers[each.bucket.layer]
        buffer.scatter_bucket(buffer.master, each.bucket, each.weights)
