"""Stores the training curves while this sailord is the leader, for the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.compression import pack, unpack
from agents.store.interface import Put, StoreError
from sailord.cluster_records import Gateway
from sailord.page.training_curve import StoredCurves, TrainingCurves

SAVE_S = 60.0
"""How often it is stored; a leader that dies takes the samples since then with it."""
PATIENCE_S = 1.0


@dataclass(eq=False)
class CurveKeeper:
    """Reads the curves at the beginning of a term, and stores them from time to time."""

    gateway: Gateway
    curves: TrainingCurves
    _saved: dict[str, float] = field(default_factory=dict)
    """By job: the moment of the last sample that is stored."""
    _loaded_for: int | None = None
    """The term for which the last leader's curves were read."""

    async def load(self, term: int) -> None:
        """Go on in our term with the last leader's curves, unless our own are newer.

        Raises what the store raises.
        """
        key = self.gateway.keys.curve
        entry = await self.gateway.store.get(key)
        self._loaded_for = term
        if entry is None:
            return
        try:
            self.curves.resume(decode(StoredCurves, unpack(entry.value)))
        except WireError as error:
            self.gateway.unreadable.note(key, str(error))

    async def save(self, term: int) -> None:
        """Store them as leader of the term, if one has grown.

        Never replace what is unreadable, or was not read in this term.
        """
        if term != self._loaded_for:
            return
        key = self.gateway.keys.curve
        last = {curve.job: curve.last_at for curve in self.curves.kept()}
        if not last or last == self._saved or key in self.gateway.unreadable.found:
            return
        value = pack(encode(self.curves.stored()))
        if await self.gateway.write_as_leader(term, [Put(key, value)]):
            self._saved = last

    async def save_often(self, term: Callable[[], int | None]) -> None:
        """Store them from time to time while this sailord is the leader."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save_now(term())

    async def save_now(self, term: int | None) -> None:
        """Store them now if the store answers; else ``save_often`` tries again."""
        if term is not None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self.save(term)
