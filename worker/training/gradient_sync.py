"""Sums each gradient over all ranks that hold its weight, while the backward pass goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.distributed.interface import Collective, Pending, Transport
from worker.layout.rank_layout import Holdings, Part, Seat, sync_parts
from worker.profiling.timeline import Recorder, Span
from worker.training.flat_buffers import LayerMemory


@dataclass(slots=True)
class _UnderWay:
    """One sum that has been started."""

    part: Part
    values: Tensor
    pending: Pending
    span: Span


class GradientSync:
    """The sums that one rank takes part in.

    Sums are started layer by layer as the backward pass finishes with them, and always in the
    order of ``sync_parts``; what layers share is started when all of them are done.
    """

    def __init__(
        self,
        seat: Seat,
        holdings: Holdings,
        memories: Mapping[int, LayerMemory],
        transport: Transport,
        recorder: Recorder,
    ) -> None:
        self._seat = seat
        self._memories = memories
        self._recorder = recorder
        self._parts: dict[int, list[tuple[Part, Collective]]] = defaultdict(list)
        for part in sync_parts(holdings):
            if seat.rank in part.ranks:
                self._parts[part.layer].append((part, transport.group(part.ranks)))
        self._under_way: list[_UnderWay] = []

    def start(self, layer: int) -> None:
        """Begin to sum the gradients of a layer, which are complete on this rank."""
        self._note_ends()
        memory = self._memories[layer]
        for part, group in self._parts.get(layer, ()):
            if part.with_whole and self._seat.index > 0:
                memory.silence_same()
            values = memory.part_of(memory.gradient, part)
            span = self._recorder.begin("sync", layer=max(layer, 0))
            pending = group.start_all_reduce(values)
            self._under_way.append(_UnderWay(part, values, pending, span))

    def finish(self) -> None:
        """Wait until all sums stand in memory."""
        for each in self._under_way:
            each.pending.wait()
            if each.span.end_ns == 0:
                self._recorder.end(each.span)
            memory = self._memories[each.part.layer]
            memory.put_part(memory.gradient, each.part, each.values)
        self._under_way.clear()

    def _note_ends(self) -> None:
        """See which sums are done; a layer's pass is how finely their ends are known."""
        for each in self._under_way if self._recorder.keeps_spans else ():
            if each.span.end_ns == 0 and each.pending.is_done():
                self._recorder.end(each.span)
