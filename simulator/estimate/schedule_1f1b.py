"""End times of 1F1B schedules, vectorised over many pipelines.

A schedule with fixed durations is a max-plus system: every start is the maximum of a few earlier
ends. 1F1B is solved in slots. In slot ``t`` stage ``s`` runs forward ``(t - s) / 2`` if that is a
whole number, else backward ``(t + s + 1) / 2 - S``. Every input of a pass is produced one slot
earlier, so one slot of all stages and pipelines takes a few vector operations. Once two states
differ by a constant, the schedule is periodic and the remaining rounds are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np

from simulator.arrays import Bools, Floats
from simulator.hardware.runtime_constants import Messaging


@dataclass(frozen=True, slots=True, eq=False)
class PassDurations:
    """Seconds of each pass and message; every array is [stage, pipeline].

    ``activation`` is the transfer to the next stage (the last row is unused), ``gradient`` the
    one to the previous stage (the first row is unused). The other four are the times that a
    message blocks the receiving or sending device.
    """

    forward: Floats
    backward: Floats
    activation: Floats
    gradient: Floats
    receive_activation: Floats
    receive_gradient: Floats
    send_activation: Floats
    send_gradient: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """End times of each device; every array is [stage, pipeline]."""

    last_backward_end: Floats
    free: Floats
    """When the device has finished its passes and sends."""


_REPEATS = 1e-12
"""Relative difference below which two shifts of the schedule count as equal."""


def run_1f1b(
    durations: PassDurations, *, micro_batches: int | Sequence[int], messaging: Messaging
) -> Finish:
    """Return the end times of pipelines with the same number of stages.

    ``micro_batches`` is one number for all pipelines, or one for each. Pipelines run together
    until the one with the fewest micro batches has run its last forward.
    """
    pipelines = durations.forward.shape[1]
    counts = np.broadcast_to(np.asarray(micro_batches), pipelines)
    running = (
        _Lockstep(durations)
        if messaging == "lockstep"
        else _Eager(
            _fold_blocking(durations, messaging),
            tail=durations.send_gradient + (durations.gradient if messaging == "blocking" else 0.0),
        )
    )
    finish = Finish(np.empty_like(durations.forward), np.empty_like(durations.forward))
    columns = np.arange(pipelines)
    slot = 0
    for count in sorted(set(counts.tolist())):
        running.micro_batches = count
        running.run_slots(slot, 2 * count)
        slot = 2 * count
        is_last = counts[columns] == count
        ending = running if is_last.all() else running.only(is_last)
        running, ended, columns = running.only(~is_last), columns[is_last], columns[~is_last]
        ending.run_slots(slot, ending.slot_count)
        finish.last_backward_end[:, ended], finish.free[:, ended] = ending.ends()
    return finish


def _fold_blocking(durations: PassDurations, messaging: Messaging) -> PassDurations:
    """Add the times that messages block a device to its passes; blocking transfers too."""
    blocking = messaging == "blocking"
    zero = np.zeros_like(durations.forward)
    forward = durations.receive_activation + durations.forward + durations.send_activation
    backward = durations.receive_gradient + durations.backward + durations.send_gradient
    return PassDurations(
        forward=forward + durations.activation if blocking else forward,
        backward=backward + durations.gradient if blocking else backward,
        activation=zero if blocking else durations.activation,
        gradient=zero if blocking else durations.gradient,
        receive_activation=zero,
        receive_gradient=zero,
        send_activation=zero,
        send_gradient=zero,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A saved state of the schedule, to detect repetition."""

    slot: int
    free: Floats
    activation_at: Floats
    gradient_at: Floats


class _Slots:
    """The state of 1F1B schedules, advanced slot by slot."""

    grids: ClassVar[tuple[str, ...]] = ("free", "activation_at", "gradient_at")

    def __init__(self, durations: PassDurations) -> None:
        self.times = durations
        self.micro_batches = 1
        self.stages, pipelines = durations.forward.shape
        self.free = np.zeros((self.stages, pipelines))
        # Row s: when the newest activation for stage s arrives and frees the channel.
        self.activation_at = np.zeros((self.stages + 1, pipelines))
        # Row s + 1: when the newest gradient for stage s arrives; stage s writes row s.
        self.gradient_at = np.zeros((self.stages + 1, pipelines))

    def only(self, columns: Bools) -> Self:
        """Return a copy with only these pipelines."""
        other = copy(self)
        other.times = PassDurations(
            *(getattr(self.times, field.name)[:, columns] for field in fields(PassDurations))
        )
        for name in self.grids:
            setattr(other, name, getattr(self, name)[:, columns])
        return other

    @property
    def slot_count(self) -> int:
        """Number of slots until the last pass has ended."""
        return 2 * (self.micro_batches + int(self.stages) - 1)

    def ends(self) -> tuple[Floats, Floats]:
        """Return when each stage ended its last backward, and when it was free."""
        raise NotImplementedError

    def forwards(self, slot: int) -> slice | None:
        """Return the stages that run a forward in this slot."""
        return self._stages(max(0, slot - 2 * (self.micro_batches - 1)), slot, slot)

    def backwards(self, slot: int) -> slice | None:
        """Return the stages that run a backward in this slot."""
        first = 2 * self.stages - 1 - slot
        return self._stages(max(0, first), first + 2 * (self.micro_batches - 1), slot + 1)

    def _stages(self, low: int, high: int, parity: int) -> slice | None:
        low += (low - parity) % 2
        high = min(high, self.stages - 1)
        return slice(low, high + 1, 2) if low <= high else None

    def run_slots(self, slot: int, end: int) -> None:
        """Run the slots from ``slot`` to before ``end``, skipping repeated rounds."""
        steady_from, steady_to = 2 * self.stages, 2 * (self.micro_batches - 1)
        mark: _Mark | None = None
        next_mark = 0
        while slot < end:
            self.step(slot)
            slot += 1
            if slot % 2 or not steady_from <= slot <= steady_to:
                continue
            # Brent's cycle detection: compare with a mark that is renewed at doubling intervals.
            shift = self._shift_since(mark)
            if mark is not None and shift is not None:
                rounds = (steady_to - slot) // (slot - mark.slot)
                self.free += shift * rounds
                self.activation_at[1:] += shift * rounds
                self.gradient_at[:-1] += shift * rounds
                slot += rounds * (slot - mark.slot)
                steady_to = -1  # One jump skips all repeated rounds.
            elif slot >= next_mark:
                next_mark = slot + max(2, slot - steady_from)
                mark = _Mark(
                    slot, self.free.copy(), self.activation_at.copy(), self.gradient_at.copy()
                )

    def _shift_since(self, mark: _Mark | None) -> Floats | None:
        """Return how far each pipeline has shifted since the mark, if by one constant."""
        if mark is None:
            return None
        allowed = _REPEATS * self.free[0]
        shift = self.free - mark.free
        if (shift.max(axis=0) - shift.min(axis=0) > allowed).any():
            return None
        one: Floats = shift[0]
        # The outermost rows belong to no channel.
        messages = (
            (self.activation_at - mark.activation_at)[1:-1] - one,
            (self.gradient_at - mark.gradient_at)[1:-1] - one,
        )
        return one if all((np.abs(rest) <= allowed).all() for rest in messages) else None

    def step(self, slot: int) -> None:
        raise NotImplementedError


class _Eager(_Slots):
    """Schedules in which a message is sent at the end of the pass that produced it."""

    grids = (*_Slots.grids, "tail")

    def __init__(self, durations: PassDurations, tail: Floats) -> None:
        super().__init__(durations)
        self.tail = tail

    def step(self, slot: int) -> None:
        times, free = self.times, self.free
        forwards, backwards = self.forwards(slot), self.backwards(slot)
        if forwards is not None:
            # No pass of this slot reads what another one of it writes, so their order is free.
            end = np.maximum(free[forwards], self.activation_at[forwards])
            end += times.forward[forwards]
            free[forwards] = end
            following = slice(forwards.start + 1, forwards.stop + 1, 2)
            arrival = np.maximum(end, self.activation_at[following])
            arrival += times.activation[forwards]
            self.activation_at[following] = arrival
        if backwards is not None:
            following = slice(backwards.start + 1, backwards.stop + 1, 2)
            end = np.maximum(free[backwards], self.gradient_at[following])
            end += times.backward[backwards]
            free[backwards] = end
            arrival = np.maximum(end, self.gradient_at[backwards])
            arrival += times.gradient[backwards]
            self.gradient_at[backwards] = arrival

    def ends(self) -> tuple[Floats, Floats]:
        return self.free - self.tail, self.free


class _Lockstep(_Slots):
    """DeepSpeed's order: in each slot gradients are exchanged first, then activations."""

    grids = (*_Slots.grids, "last_backward_end")

    def __init__(self, durations: PassDurations) -> None:
        super().__init__(durations)
        self.last_backward_end = np.zeros_like(self.free)

    def step(self, slot: int) -> None:
        times, free = self.times, self.free
        backwards = self.backwards(slot)
        self._send_gradients(self.backwards(slot - 1))
        if backwards is not None:
            following = slice(backwards.start + 1, backwards.stop + 1, 2)
            np.maximum(free[backwards], self.gradient_at[following], out=free[backwards])
            free[backwards] += times.receive_gradient[backwards]
        self._send_activations(self.forwards(slot - 1) if slot else None)
        if backwards is not None:
            free[backwards] += times.backward[backwards]
            last = 2 * (self.micro_batches + self.stages - 1) - 1 - slot
            if 0 <= last < self.stages:
                self.last_backward_end[last] = free[last]
        forwards = self.forwards(slot)
        if forwards is not None:
            np.maximum(free[forwards], self.activation_at[forwards], out=free[forwards])
            free[forwards] += times.receive_activation[forwards] + times.forward[forwards]

    def _send_gradients(self, stages: slice | None) -> None:
        if stages is None:
            return
        times, free = self.times, self.free
        free[stages] += times.send_gradient[stages]
        arrival = np.maximum(free[stages], self.gradient_at[stages])
        self.gradient_at[stages] = arrival + times.gradient[stages]

    def _send_activations(self, stages: slice | None) -> None:
        if stages is None:
            return
        times, free = self.times, self.free
        following = slice(stages.start + 1, stages.stop + 1, 2)
        free[stages] += times.send_activation[stages]
        arrival = np.maximum(free[stages], self.activation_at[following])
        self.activation_at[following] = arrival + times.activation[stages]

    @property
    def slot_count(self) -> int:
        return super().slot_count + 1  # One more slot sends the last gradient.

    def ends(self) -> tuple[Floats, Floats]:
        return self.last_backward_end, self.free
