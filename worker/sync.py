"""Sums each gradient over all ranks that hold its weight, while the backward pass goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.layout import Holdings, Seat, SyncUnit, sync_units
from worker.memory import LayerMemory
from worker.timeline import Recorder, Span
from worker.transport.base import Collective, Pending, Transport


@dataclass(slots=True)
class _UnderWay:
    """One sum that has been started."""

    unit: SyncUnit
    values: Tensor
    pending: Pending
    span: Span


class GradientSync:
    """The sums that one rank takes part in.

    Sums are started layer by layer as the backward pass finishes with them, and always in the
    order of ``sync_units``; what layers share is started when all of them are done.
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
        self._units: dict[int, list[tuple[SyncUnit, Collective]]] = defaultdict(list)
        for unit in sync_units(holdings):
            if seat.rank in unit.ranks:
                self._units[unit.layer].append((unit, transport.group(unit.ranks)))
        self._under_way: list[_UnderWay] = []

    def start(self, layer: int) -> None:
        """Begin to sum the gradients of a layer, which are complete on this rank."""
        self._note_ends()
        memory = self._memories[layer]
        for unit, group in self._units.get(layer, ()):
            if unit.with_whole and self._seat.index > 0:
                memory.silence_same()
            values = _values(memory, unit)
            span = self._recorder.begin("sync", layer=max(layer, 0))
            pending = group.start_all_reduce(values)
            self._under_way.append(_UnderWay(unit, values, pending, span))

    def finish(self) -> None:
        """Wait until all sums stand in memory."""
        for each in self._under_way:
            each.pending.wait()
            if each.span.end_ns == 0:
                self._recorder.end(each.span)
            memory = self._memories[each.unit.layer]
            if len(each.unit.atoms) > 0 and not each.unit.with_whole:
                memory.put_atoms(memory.gradient, each.unit.atoms, each.values)
        self._under_way.clear()

    def _note_ends(self) -> None:
        """See which sums are done; a layer's pass is how finely their ends are known."""
        for each in self._under_way if self._recorder.keeps_spans else ():
            if each.span.end_ns == 0 and each.pending.is_done():
                self._recorder.end(each.span)


def _values(memory: LayerMemory, unit: SyncUnit) -> Tensor:
    """The flat gradients of a unit: in place where they lie in one piece."""
    if unit.with_whole and len(unit.atoms) > 0:
        return memory.gradient
    if unit.with_whole:
        return memory.whole_part(memory.gradient)
    return memory.atoms_of(memory.gradient, unit.atoms)
