"""Upper bounds of the number of micro batches that a stage can run within a given time.

Under 1F1B a stage waits until its first micro batch has passed the layers before it, runs its share
of every micro batch, and the last gradient returns through those layers. With ``k`` stages behind
it, at most ``k + 1`` micro batches are ahead of their backward, so the stage also waits for the
first one to return. The layers before and behind take at least the time of the best GPUs for them.
Gradient synchronisation and the optimizer step follow.

The limits also hold for zero-bubble schedules if the tables divide backwards. There a micro batch
returns through the gradients of inputs alone, and the gradients of weights may follow the last of
them: so nothing but a stage's own sums is sure to come after its last pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.pipelines.pipeline_template import TemplateMaker
from planner.pipelines.stage_memory import all_range_sums
from planner.problem.inventory import Lot
from planner.search.recomputation import Recomputation
from planner.search.stage_times import BEHIND_MAX, Neighbourhood, StageOption, Times
from planner.search.sync_bound import SyncBound
from simulator.arrays import Floats, Ints, prefix_sums
from simulator.hardware.runtime_constants import platform_of
from simulator.spec.job import RecomputePolicy

STAGES_BESIDE = (0, 1, 2, 4, 8, 1 << 30)
"""Upper ends of the ranges in which numbers of stages on one machine are bounded together."""


class StageTimeTables:
    """The tables of stage times that one search and its bound use."""

    def __init__(
        self,
        maker: TemplateMaker,
        lots: Sequence[Lot],
        *,
        degrees: Sequence[int],
        recompute: RecomputePolicy,
        per_layer_sync: bool,
        divides: bool = False,
        takes_outer_steps: bool = False,
    ) -> None:
        """With ``divides``, bounds hold for zero-bubble schedules, too; with
        ``takes_outer_steps``, for iterations between outer steps.
        """
        self.divides = divides
        self.maker, self.lots, self.costs = maker, lots, maker.costs
        self.per_layer_sync = per_layer_sync
        self.sync = SyncBound(
            self.costs, maker.network, lots, degrees, per_layer_sync, takes_outer_steps
        )
        numbers = {lot: number for number, lot in enumerate(maker.lots)}
        self.lot_of = {lot.gpu: numbers[lot] for lot in reversed(lots)}
        """The number of a lot of each GPU kind, among the maker's."""
        self.choices = tuple(
            StageOption(gpu, tp, recompute)
            for gpu in sorted(self.lot_of)
            for tp in degrees
            if any(lot.gpu == gpu and lot.room(tp) for lot in lots)
        )
        self.recompute = recompute
        self.again = Recomputation(maker, self.choices, self.lot_of)
        self._times: dict[int, Times] = {}
        self._room: dict[tuple[int, int], Floats] = {}
        self._rests: dict[tuple[int, int], Floats] = {}
        self._index = {choice: index for index, choice in enumerate(self.choices)}

    @property
    def table_size(self) -> int:
        """Entries of the tables that each target time needs."""
        layers = self.costs.layer_count
        return min(BEHIND_MAX + 1, layers) * len(self.choices) * layers * layers

    def times(self, micro_batch: int) -> Times:
        """The times of one micro batch size, computed once."""
        if micro_batch not in self._times:
            self._times[micro_batch] = self._timed(micro_batch)
        return self._times[micro_batch]

    # -- tables ---------------------------------------------------------------------------------

    def _timed(self, micro_batch: int) -> Times:
        costs, layers = self.costs, self.costs.layer_count
        first, end = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        has_before, has_behind = first > 0, end < layers
        sizes = np.array([costs.output_bytes(n) * micro_batch for n in range(layers)])
        transfers = np.array([self._transfers_s(choice, sizes) for choice in self.choices])
        transfer = transfers.min(axis=0)
        rows: list[list[Floats]] = []
        ahead_rows, back_rows, later_rows = [], [], []
        for choice in self.choices:
            times = costs.times(choice.gpu, tp=choice.tp, samples=micro_batch)
            back = costs.backward_by_layer(
                choice.gpu,
                tp=choice.tp,
                samples=micro_batch,
                recompute=self.again.stage(choice).least,
            )
            ahead_rows.append(times.forward)
            back_rows.append(back)
            later = np.zeros(layers)
            if self.divides:
                later = costs.weight_by_layer(choice.gpu, tp=choice.tp, samples=micro_batch)
            later_rows.append(np.minimum(later, back))
            forward, backward = all_range_sums(times.forward), all_range_sums(back)
            platform = platform_of(choice.gpu)
            message = platform.message_s
            gather = self._gather_s(choice, sizes)
            forward = forward + np.where(has_before, message + gather[first], platform.load_s)
            forward = forward + message * has_behind
            top = np.append(0.0, back)
            below_top = backward - top[end]
            backward = backward + has_behind * (message + gather[end]) + message * has_before
            held = costs.parameters(choice.tp)
            both = ~(has_before | has_behind)
            count = all_range_sums(held) - both * costs.tied_parameters(choice.tp)
            # Under ZeRO-1 by buckets, other devices may update all of a stage.
            is_sure = not costs.has_owners
            optimizer = is_sure * count * times.optimizer_s_per_parameter
            rows.append([forward, backward, below_top, optimizer])
        # By choice, the time of the layers of other stages.
        forwards, backwards = np.array(ahead_rows), np.array(back_rows) - np.array(later_rows)
        through = forwards + backwards
        forwards = np.broadcast_to(forwards.min(axis=0), forwards.shape)
        backwards = np.broadcast_to(backwards.min(axis=0), backwards.shape)
        fills, drains = (
            np.stack([prefix_sums(row) for row in rows]) for rows in (forwards, backwards)
        )
        out_s = min(map(self.sync.leave_machine_s, sorted(set(sizes[:-1].tolist()))), default=0.0)
        gpus = sorted({choice.gpu for choice in self.choices})
        message = min(platform_of(gpu).message_s for gpu in gpus)
        load = min(platform_of(gpu).load_s for gpu in gpus)
        before = has_before[:, 0]
        return Times(
            micro_batch,
            self.choices,
            np.array(ahead_rows) + np.array(back_rows),
            np.array(ahead_rows),
            forward=np.stack([row[0] for row in rows]),
            backward=np.stack([row[1] for row in rows]),
            through=through,
            inputs=np.stack(
                [
                    row[1] - all_range_sums(later)
                    for row, later in zip(rows, later_rows, strict=True)
                ]
            ),
            below_top=np.stack([row[2] for row in rows]),
            last_send=np.array([platform_of(choice.gpu).message_s for choice in self.choices]),
            optimizer=np.stack([row[3] for row in rows]),
            ahead=fills + before * (load + message + transfers),
            home=drains + before * (message + transfers),
            behind=(fills + drains)[:, -1:]
            - fills
            - drains
            + has_behind[0] * 2 * (message + transfers),
            hop_s=4 * message + 2 * float(transfer[1:-1].min(initial=math.inf)),
            leave_machine_s=2 * max(0.0, out_s - float(transfer[1:-1].min(initial=math.inf))),
            transfer=transfers,
            leave=np.array([self.leave_s(choice, sizes) for choice in self.choices]),
            iteration_s=np.array([platform_of(choice.gpu).iteration_s for choice in self.choices]),
            is_divided=self.divides,
        )

    def _gather_s(self, choice: StageOption, sizes: Floats) -> Floats:
        """By boundary: seconds for a group's ranks to gather the activations received over it."""
        if choice.tp == 1 or self.costs.runtime.sends_whole:
            return np.zeros(len(sizes) + 1)
        places = dict.fromkeys(lot.place for lot in self.lots if lot.gpu == choice.gpu)
        found: dict[float, float] = {}
        for size in dict.fromkeys(sizes.tolist()):
            found[size] = min(
                self.maker.network.all_gather(place, gpus=choice.tp, total_bytes=size)
                for place in places
            )
        return np.array([0.0, *(found[size] for size in sizes.tolist())])

    def _transfers_s(self, choice: StageOption, sizes: Floats) -> Floats:
        """By boundary: least seconds of a message over it, from or to such a group."""
        sync, gpu, tp = self.sync, choice.gpu, choice.tp
        return np.array([0.0, *(sync.transfer_s(gpu, tp, x) for x in sizes[:-1].tolist()), 0.0])

    def leave_s(self, choice: StageOption, sizes: Floats, other: str | None = None) -> Floats:
        """By boundary: ``_transfers_s`` to another machine, perhaps of another GPU kind."""
        least = {
            size: self.sync.leave_machine_s(size, choice.gpu, other, choice.tp)
            for size in dict.fromkeys(sizes[:-1].tolist())
        }
        return np.array([0.0, *(least[size] for size in sizes[:-1].tolist()), 0.0])

    # -- micro batches in a given time ----------------------------------------------------------

    def most(self, micro_batch: int, seconds: float, fewest: int, most: int) -> Floats:
        """Upper bound of micro batches by [stages behind, choice, first layer, end].

        It holds for any number of pipelines from ``fewest`` to ``most``.
        """
        times, again = self.times(micro_batch), self.again.seconds(micro_batch, fewest, most)
        forward = times.forward
        sync = self._sync(fewest, most)
        optimizer = times.optimizer / (most if self.costs.job.zero else 1)
        start = self._start(times, fewest, most)
        below = self.again.below_top(times, again)
        tail = self._tail(
            times, sync, optimizer, self._tied(micro_batch, fewest, most), start, below
        )
        left = seconds - times.iteration_s[:, None, None] - times.ahead[:, :, None] - tail
        layers = times.layers
        behind_max = min(BEHIND_MAX, layers - 1)
        k = np.arange(behind_max + 1)[:, None, None, None]
        # A machine holds few GPUs, so some of the hops must leave it.
        tp = np.array([choice.tp for choice in self.choices])[:, None, None]
        outward = (tp + k - 1) // max(lot.gpus_per_machine for lot in self.lots)
        behind = times.behind[:, None, :] + np.maximum(k - 1, 0) * times.hop_s
        behind = behind + np.maximum(outward - 1, 0) * times.leave_machine_s
        slack = left - np.where(k > 0, behind, 0.0)

        def counted(again: Floats) -> Floats:
            backward = times.backward + again
            work = forward + backward
            with np.errstate(divide="ignore", invalid="ignore"):
                straight = left / work
                few = (slack - forward) / backward
                many = np.where(few <= k + 1, few, (slack + k * forward) / work)
                # Micro batch i returns before micro batch i + k + 1 starts.
                rounds = np.floor(left / (forward + times.inputs + again + behind) + 1e-9)
                many = np.where(k > 0, np.minimum(many, (k + 1) * rounds), many)
            if layers - 1 > behind_max:
                # The last row also bounds all stages that are further ahead.
                many[-1] = np.inf
            counts: Floats = np.floor(np.minimum(straight, many) + 1e-9)
            return counts

        count, room = counted(again), self.room(micro_batch, fewest, most)[None]
        if self.again.is_chosen:
            # Fewer micro batches than may be in flight need less recomputation.
            fewer = np.minimum(np.minimum(counted(again[:1]), room), k)
            count = np.where((room > k) & (count > k), count, fewer)
        count = np.where(room > k, count, np.minimum(count, room))
        ranged = np.arange(layers + 1)[:, None] < np.arange(layers + 1)[None, :]
        return np.where(ranged, np.maximum(count, 0.0), 0.0)

    def neighbourhoods(
        self, micro_batch: int, fewest: int, most: int, *, is_rough: bool = False
    ) -> list[Neighbourhood]:
        """The cases of what a stage's machine holds; each stage of a plan is in one of them, or if
        ``is_rough`` all in the only one.

        Either the ring of one of the stage's layers runs inside the machine: then a group of each
        other pipeline is there, too, and leaves little room for neighbouring stages. Or all rings
        of the stage leave the machine; then the rings of all stages on it share its NIC.
        """
        tp = np.array([choice.tp for choice in self.choices])
        machine = np.array([self._machine_of(choice.gpu) for choice in self.choices])
        least = min(self.sync.degrees)

        def most_beside(room: Ints) -> Ints:
            return np.where(room < 0, 0, 1 + room // least)

        if is_rough:
            one = self._case(micro_batch, (fewest, most), None, 1, np.ones_like(tp))
            return [replace(one, rest_alone=one.rest)]
        if fewest == 1 or self.sync.is_free:
            # Perhaps no ring of the stage is in its machine, and none leaves it.
            return [self._case(micro_batch, (1, most), None, 1, most_beside(machine - tp))]
        inside = most_beside(machine - tp - (fewest - 1) * least)
        found = [self._case(micro_batch, (fewest, most), None, 1, inside)]
        for low, high in itertools.pairwise(STAGES_BESIDE):
            beside = np.minimum(most_beside(machine - tp), high)
            found.append(self._case(micro_batch, (fewest, most), low + 1, low + 1, beside))
        return [one for one in found if (one.most >= one.fewest).any()]

    def _case(
        self,
        micro_batch: int,
        pipelines: tuple[int, int],
        stages: int | None,
        fewest: int,
        most: Ints,
    ) -> Neighbourhood:
        times = self.times(micro_batch)
        optimizer = times.optimizer / (pipelines[1] if self.costs.job.zero else 1)
        sync = self._sync(*pipelines, stages)
        tied = self._tied(micro_batch, *pipelines, stages)
        start = self._start(times, *pipelines)
        below = self.again.below_top(times, self.again.seconds(micro_batch, *pipelines))
        out_s = times.leave - times.transfer
        rests = []
        for extra in (np.zeros_like(out_s), out_s):
            away = replace(times, home=times.home + extra)
            before = times.ahead + extra + times.iteration_s[:, None]
            rests.append(before[:, :, None] + self._tail(away, sync, optimizer, tied, start, below))
        last = self._last_s(sync, tied)
        end = np.concatenate([np.repeat(last[:, :1], times.layers, axis=1), last[:, 1:]], axis=1)
        end = end + optimizer[:, 0, :] + times.iteration_s[:, None]
        return Neighbourhood(rests[0], rests[1], end, fewest, most)

    def _machine_of(self, gpu: str) -> int:
        """GPUs of the largest machine with a GPU kind."""
        return max(lot.gpus_per_machine for lot in self.lots if lot.gpu == gpu)

    def _sync(self, fewest: int, most: int, stages: int | None = None) -> Floats:
        """Least seconds of gradient synchronisation, by [choice, layer]."""
        by_layer = self.sync.by_layer
        return np.stack([by_layer(c.gpu, c.tp, fewest, most, stages) for c in self.choices])

    def end_s(self, micro_batch: int, fewest: int, most: int) -> float:
        """Least seconds between the last backward of all stages and the iteration's end."""
        return self._start(self.times(micro_batch), fewest, most)

    def _start(self, times: Times, fewest: int, most: int) -> float:
        """Least seconds of the first stage's last sum and of its optimizer step.

        It may be the only stage: then no other group may hold the shared tensor.
        """
        tied = self._tied(times.micro_batch, fewest, most)
        last = self._last_s(self._sync(fewest, most), tied)
        shares = most if self.costs.job.zero else 1
        return float(last.min()) + float(times.optimizer[:, 0, 1].min()) / shares

    def _tied(self, micro_batch: int, fewest: int, most: int, stages: int | None = None) -> Floats:
        """Least seconds of the sum of a shared tensor, by [choice, 0 or 1].

        Last, for pipelines of one stage; before it, for pipelines of several. If no group can hold
        all layers, there are only the latter, and each has a group at either end.
        """
        tied_s, gpus = self.sync.tied_s, sum(lot.gpus for lot in self.lots)
        numbers = (fewest + 1, fewest)
        if (self.room(micro_batch, fewest, most)[:, 0, -1] < 1).all():
            numbers = (2 * fewest, 2 * fewest)
        groups_max = max(fewest, min(2 * most, gpus))
        return np.array(
            [
                [tied_s(c.gpu, c.tp, min(low, groups_max), groups_max, stages) for low in numbers]
                for c in self.choices
            ]
        )

    def _last_s(self, sync: Floats, tied: Floats) -> Floats:
        """Least seconds from the first stage's last backward to its optimizer step, by choice and
        as in ``_tied``.

        A group sums the first layer, then the shared tensor; under gloo perhaps both at once.
        """
        first = sync[:, :1]
        last: Floats = np.maximum(first, tied) if self.sync.is_gloo else first + tied
        return last

    def stage_s(
        self,
        micro_batch: int,
        most: int,
        pipelines: int,
        *,
        behind: int,
        where: tuple[int, Ints, Ints],
    ) -> Floats:
        """Least seconds for stages at (choice, first layers, ends), by [stage, micro batches - 1].

        Infinite where memory is too small. Exactly ``behind`` stages are behind them.
        """
        times = self.times(micro_batch)
        again = self.again.seconds(micro_batch, pipelines, pipelines)
        rests, rooms = self.rest_and_room(micro_batch, pipelines)
        rest = rests[(min(behind, len(rests) - 1), *where)][:, None]
        room = rooms[where][:, None]
        n = np.arange(1, most + 1)
        forward = times.forward[where][:, None]
        more = self.again.at(again, np.minimum(n, behind + 1), where)
        backward = times.backward[where][:, None] + more
        spent = n * (forward + backward)
        if behind:
            choice, _, end = where
            back = (times.behind[choice, end] + (behind - 1) * times.hop_s)[:, None]
            later = np.maximum(n - behind - 1, 0)
            spent = np.maximum(spent, forward + back + n * backward + later * forward)
            inputs = times.inputs[where][:, None] + more
            spent = np.maximum(spent, -(-n // (behind + 1)) * (forward + inputs + back))
        seconds: Floats = np.where(room >= np.minimum(n, behind + 1), spent + rest, np.inf)
        return seconds

    def index_of(self, gpu: str, tp: int) -> int:
        """Index of a stage option."""
        return self._index[StageOption(gpu, tp, self.recompute)]

    def rest_and_room(self, micro_batch: int, pipelines: int) -> tuple[Floats, Floats]:
        """Seconds of a stage besides its passes, and micro batches that fit its memory.

        By [choice, first layer, end], the first also by [stages behind or 1], for one of
        ``pipelines`` pipelines.
        """
        key = (micro_batch, pipelines)
        if key not in self._rests:
            times = self.times(micro_batch)
            both = (pipelines, pipelines)
            sync = self._sync(*both)
            optimizer = times.optimizer / (pipelines if self.costs.job.zero else 1)
            start, tied = self._start(times, *both), self._tied(micro_batch, *both)
            below = self.again.below_top(times, self.again.seconds(micro_batch, *both))
            tail = self._tail(times, sync, optimizer, tied, start, below)
            self._rests[key] = tail + times.iteration_s[:, None, None] + times.ahead[:, :, None]
        return self._rests[key], self.room(micro_batch, pipelines, pipelines)

    def _tail(
        self,
        times: Times,
        sync: Floats,
        optimizer: Floats,
        tied: Floats,
        start: float,
        below_top: Floats,
    ) -> Floats:
        """Least seconds from a stage's last backward to the end of the iteration.

        By [stages behind or 1, choice, first layer, end].
        """
        layers = times.layers
        last = self._last_s(sync, tied)
        way = np.zeros_like(times.home) if self.divides else times.home + start
        home = np.broadcast_to(way[:, :, None], optimizer.shape).copy()
        home[:, 0, :] = last[:, :1] + optimizer[:, 0, :]
        home[:, 0, layers] = last[:, 1] + optimizer[:, 0, layers]
        if self.sync.is_gloo:
            ranges = np.stack([_range_maxima(row) for row in sync])
        else:
            ranges = np.stack([all_range_sums(row) for row in sync])
            # The first stage sums the shared tensor after all its layers.
            ranges[:, 0, 1:layers] += tied[:, :1]
            ranges[:, 0, layers] += tied[:, 1]
        if not self.per_layer_sync:
            serial: Floats = np.maximum(home, ranges + optimizer)[None]
            return serial
        # The topmost layer is synchronised while those below still run their last backward; under
        # gloo, whatever takes longest may.
        sent = times.last_send[:, None, None] * (np.arange(layers + 1) > 0)[None, :, None]
        beside = np.maximum(ranges - below_top - sent, 0.0)
        tail: Floats = np.maximum(home, beside + optimizer)
        return tail

    def room(self, micro_batch: int, fewest: int, most: int) -> Floats:
        """Micro batches that a stage may hold at once, by [choice, first layer, end]."""
        # One pipeline needs fewer buffers; many have smaller optimizer shards under ZeRO-1.
        if fewest > 1:
            return self._room_with(micro_batch, most)
        alone = self._room_with(micro_batch, 1)
        if not self.costs.job.zero:
            return alone
        either: Floats = np.maximum(alone, self._room_with(micro_batch, most))
        return either

    def _room_with(self, micro_batch: int, pipelines: int) -> Floats:
        key = (micro_batch, pipelines)
        if key not in self._room:
            self._room[key] = np.stack(
                [
                    self.maker.memory.most_in_flight(stage, micro_batch, pipelines)
                    for stage in map(self.again.stage, self.choices)
                ]
            )
        return self._room[key]


def _range_maxima(row: Floats) -> Floats:
    """The largest of each range, by [first, end]; 0 for empty ranges."""
    found = np.zeros((len(row) + 1, len(row) + 1))
    for first in range(len(row)):
        found[first, first + 1 :] = np.maximum.accumulate(row[first:])
    return found
