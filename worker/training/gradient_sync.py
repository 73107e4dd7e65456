"""Sums each gradient over all ranks that hold its weight, overlapped with the backward pass.

All holders get the sum or, under ZeRO-1, the owner of its bucket, who alone updates the weights.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.distributed.interface import Collective, PendingOperation, Transport
from worker.layout.rank_layout import Bucket, Holdings, RankPlace, sync_buckets
from worker.profiling.compute_time import ComputeTimer, TimeMark
from worker.profiling.timeline import Recorder, Span
from worker.training.bucket_copies import COPIES_BYTES_MAX, wait_until_done
from worker.training.flat_buffers import LayerBuffer


@dataclass(slots=True, eq=False)
class _RunningSum:
    """A gradient sum that has been started."""

    bucket: Bucket
    values: Tensor
    pending: PendingOperation
    span: Span
    begun: TimeMark
    copied_bytes: int
    """The bytes of the values if they are a copy of the buffer, which is freed once it is written
    back."""


class GradientSync:
    """The gradient sums that one rank takes part in.

    A layer's sums start when the backward pass has finished with it, always in the order of
    ``sync_buckets``; sums of shared tensors start when all layers are done. If the copies that are
    being summed take too much memory, later sums wait in a queue, which nothing waits for before
    ``finish``.
    """

    def __init__(
        self,
        place: RankPlace,
        holdings: Holdings,
        buffers: Mapping[int, LayerBuffer],
        transport: Transport,
        recorder: Recorder,
        busy: ComputeTimer,
        *,
        to_owners: bool = False,
        shares_tokens: bool = False,
    ) -> None:
        """``to_owners``: a bucket's sum goes to its owner alone.

        ``shares_tokens``: under sequence parallelism every rank of a stage has a part of all
        unsplit gradients.
        """
        self._rank, self._to_owners = place.rank, to_owners
        self._has_duplicates = place.index > 0 and not shares_tokens
        self._buffers, self._transport = buffers, transport
        self._recorder, self._busy = recorder, busy
        self._buckets: dict[int, list[tuple[Bucket, Collective]]] = defaultdict(list)
        for bucket in sync_buckets(holdings):
            if place.rank in bucket.ranks:
                self._buckets[bucket.layer].append((bucket, transport.group(bucket.ranks)))
        self._queue: deque[tuple[Bucket, Collective]] = deque()
        self._under_way: list[_RunningSum] = []

    def start(self, layer: int) -> None:
        """Start to sum the gradients of a layer, which are complete on this rank."""
        if self._recorder.keeps_spans or not self._busy.runs_ahead:
            self._note_ended()
        self._write_back()
        self._queue += self._buckets.get(layer, ())
        self._start_queued()

    def finish(self) -> None:
        """Wait until all sums are written to the buffers of the ranks that get them."""
        while self._queue:
            # All ranks start sums in one order, so none of them waits for what is queued here.
            oldest = self._copies()[0]
            wait_until_done(oldest.pending, self._transport)
            self._under_way.remove(oldest)
            self._end(oldest)
            del oldest  # Its memory is that of the next one.
            self._start_queued()
        for each in self._under_way:
            self._end(each)
        self._under_way.clear()

    def _start_queued(self) -> None:
        """Start sums in their order, as far as there is memory for copies."""
        held = sum(each.copied_bytes for each in self._copies())
        while self._queue:
            bucket, group = self._queue[0]
            buffer = self._buffers[bucket.layer]
            copied = buffer.copied_bytes(bucket)
            if copied and held and held + copied > COPIES_BYTES_MAX:
                return
            self._queue.popleft()
            held += copied
            if bucket.with_unsplit and self._has_duplicates:
                buffer.zero_duplicate_gradients()
            values = buffer.gather_bucket(buffer.gradient, bucket)
            span = self._recorder.begin("sync", layer=max(bucket.layer, 0))
            if self._to_owners:
                pending = group.start_reduce(values, target=bucket.ranks.index(bucket.owner))
            else:
                pending = group.start_all_reduce(values)
            begun = self._busy.now()
            self._under_way.append(_RunningSum(bucket, values, pending, span, begun, copied))

    def _note_ended(self) -> None:
        """Note the sums that have ended since the last layer; most end in their order."""
        for each in self._under_way:
            if each.span.end_ns == 0 and not each.pending.is_done():
                return
            self._note_end(each)

    def _note_end(self, each: _RunningSum) -> None:
        if each.span.end_ns == 0:
            self._recorder.end(each.span)
            self._busy.end_sum(each.begun)

    def _write_back(self) -> None:
        """Write back the copies whose sums have ended, to free their memory."""
        for each in self._copies():
            if each.pending.is_done():
                self._under_way.remove(each)
                self._end(each)

    def _copies(self) -> list[_RunningSum]:
        return [each for each in self._under_way if each.copied_bytes]

    def _end(self, each: _RunningSum) -> None:
        each.pending.wait()
        self._note_end(each)
        if self._to_owners and each.bucket.owner != self._rank:
            return  # The values are parts of the sum.
        buffer = self._buffers[each.bucket.layer]
        buffer.scatter_bucket(buffer.gradient, each.bucket, each.values)
