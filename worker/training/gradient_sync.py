"""Sums each gradient over all ranks that hold its weight, while the backward pass goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.distributed.interface import Collective, Pending, Transport
from worker.layout.rank_layout import Bucket, Holdings, RankPlace, sync_buckets
from worker.profiling.timeline import Recorder, Span
from worker.training.flat_buffers import LayerBuffer


@dataclass(slots=True)
class _RunningSum:
    """One sum that has been started."""

    part: Bucket
    values: Tensor
    pending: Pending
    span: Span


class GradientSync:
    """The sums that one rank takes part in.

    Sums are started layer by layer as the backward pass finishes with them, and always in the
    order of ``sync_buckets``; what layers share is started when all of them are done.
    """

    def __init__(
        self,
        place: RankPlace,
        holdings: Holdings,
        buffers: Mapping[int, LayerBuffer],
        transport: Transport,
        recorder: Recorder,
    ) -> None:
        self._place = place
        self._buffers = buffers
        self._recorder = recorder
        self._parts: dict[int, list[tuple[Bucket, Collective]]] = defaultdict(list)
        for part in sync_buckets(holdings):
            if place.rank in part.ranks:
                self._parts[part.layer].append((part, transport.group(part.ranks)))
        self._under_way: list[_RunningSum] = []

    def start(self, layer: int) -> None:
        """Begin to sum the gradients of a layer, which are complete on this rank."""
        self._note_ends()
        buffer = self._buffers[layer]
        for part, group in self._parts.get(layer, ()):
            if part.with_unsplit and self._place.index > 0:
                buffer.zero_duplicate_gradients()
            values = buffer.gather_bucket(buffer.gradient, part)
            span = self._recorder.begin("sync", layer=max(layer, 0))
            pending = group.start_all_reduce(values)
            self._under_way.append(_RunningSum(part, values, pending, span))

    def finish(self) -> None:
        """Wait until all sums stand in memory."""
        for each in self._under_way:
            each.pending.wait()
            if each.span.end_ns == 0:
                self._recorder.end(each.span)
            buffer = self._buffers[each.part.layer]
            buffer.scatter_bucket(buffer.gradient, each.part, each.values)
        self._under_way.clear()

    def _note_ends(self) -> None:
        """See which sums are done; a layer's pass is how finely their ends are known."""
        for each in self._under_way if self._recorder.keeps_spans else ():
            if each.span.end_ns == 0 and each.pending.is_done():
                self._recorder.end(each.span)
