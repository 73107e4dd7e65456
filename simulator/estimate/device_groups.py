"""A plan's device groups as numpy columns, one row per group, in the order of the plan.

Columns keep plans of thousands of GPUs fast. Equal places get equal numbers, so that prices and
times are looked up once per kind and distributed to the rows by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.spec.plan import Pipeline, Place, Plan

GroupId = tuple[int, int, int]
"""(pipeline, stage, index within the stage's split)."""

_COLUMNS = ("stage", "index", "place", "tp", "first", "end", "samples", "recompute", "offload")


@dataclass(frozen=True, eq=False)
class DeviceGroups:
    """Every device group of a plan; each chunk of an interleaved schedule has its own row."""

    plan: Plan
    bounds: Ints
    """Pipeline p has the rows ``bounds[p]`` to ``bounds[p + 1]``."""
    pipeline: Ints
    stage: Ints
    index: Ints
    """Index within the split of the stage."""
    place: Ints
    """Index into ``places``."""
    tp: Ints
    first: Ints
    end: Ints
    samples: Ints
    """Samples of each micro batch."""
    recompute: Ints
    """How many of its layers, from the first on, are recomputed."""
    offload: Ints
    """How many of the layers after these are offloaded."""
    places: tuple[Place, ...]

    @classmethod
    def of(cls, plan: Plan) -> DeviceGroups:
        numbers: dict[Place, int] = {}
        blocks: dict[tuple[int, int], tuple[int, int]] = {}
        flat: list[int] = []
        for pipeline in plan.pipelines:
            # Pipelines that share one tuple of stages are read once.
            size = plan.size_of(pipeline)
            if (id(pipeline.stages), size) not in blocks:
                begin = len(flat) // len(_COLUMNS)
                _read(pipeline, size, numbers, flat)
                blocks[id(pipeline.stages), size] = (begin, len(flat) // len(_COLUMNS))
        rows = np.array(flat, dtype=np.int64).reshape(-1, len(_COLUMNS))
        spans = [blocks[id(p.stages), plan.size_of(p)] for p in plan.pipelines]
        if len(blocks) < len(spans):
            rows = rows[np.concatenate([np.arange(*span) for span in spans])]
        sizes = [end - begin for begin, end in spans]
        columns = dict(zip(_COLUMNS, np.ascontiguousarray(rows.T), strict=True))
        return cls(
            plan=plan,
            bounds=np.array([0, *accumulate(sizes)]),
            pipeline=np.repeat(np.arange(len(sizes)), sizes),
            places=tuple(numbers),
            **columns,
        )

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """First row and end row of each pipeline."""
        return list(pairwise(self.bounds.tolist()))

    @cached_property
    def ids(self) -> list[GroupId]:
        """The id of each row."""
        return list(
            zip(self.pipeline.tolist(), self.stage.tolist(), self.index.tolist(), strict=True)
        )

    @cached_property
    def micro_batches(self) -> Ints:
        """Micro batches of each row's pipeline."""
        return np.array([pipe.micro_batches for pipe in self.plan.pipelines])[self.pipeline]

    @cached_property
    def stage_count(self) -> Ints:
        """Number of stages of each row's pipeline."""
        return np.array([len(pipe.stages) for pipe in self.plan.pipelines])[self.pipeline]

    @cached_property
    def is_chain(self) -> list[bool]:
        """Whether, per pipeline, every stage is one device group."""
        return [
            end - begin == len(pipeline.stages)
            for (begin, end), pipeline in zip(self.blocks, self.plan.pipelines, strict=True)
        ]

    @cached_property
    def owner(self) -> Ints:
        """The row that owns each row's devices: for chunks, the device group's first chunk."""
        rows = np.arange(len(self))
        virtual = self.plan.virtual_stages
        if virtual > 1:
            # Interleaved schedules have no split stages, so a stage is a row.
            rows -= self.stage - self.stage % (self.stage_count // virtual)
        return rows

    @cached_property
    def owning(self) -> Ints:
        """The rows that own devices."""
        rows: Ints = np.flatnonzero(self.owner == np.arange(len(self)))
        return rows

    @property
    def kept_from(self) -> Ints:
        """The first layer of each row that is not recomputed."""
        kept: Ints = self.first + self.recompute
        return kept

    @cached_property
    def hops(self) -> StageHops:
        """The pairs of rows in neighbouring stages that exchange samples."""
        ahead = np.flatnonzero(self.stage[1:] == self.stage[:-1] + 1)
        if all(self.is_chain):
            return StageHops(ahead, ahead + 1, self.samples[ahead])
        return _split_hops(self)

    @cached_property
    def outer_parts(self) -> list[tuple[Plan, Ints]]:
        """Of a plan with outer steps, the plan of each outer group and its rows in this one."""
        if self.plan.outer_every is None:
            return [(self.plan, np.arange(len(self)))]
        return [
            (
                self.plan.outer_group(pipelines),
                np.concatenate([np.arange(*self.blocks[p]) for p in pipelines]),
            )
            for pipelines in self.plan.outer_groups
        ]

    def sum_by_owner(self, values: Floats) -> Floats:
        """Add up the values of each device group's chunks at the owning row."""
        if len(self.owning) == len(self):
            return values
        return np.bincount(self.owner, weights=values, minlength=len(self)).astype(np.float64)

    def holders(self, layer_count: int) -> Floats:
        """Count the device groups that hold each layer: one per pipeline, more if it is split."""
        begun = np.bincount(self.first, minlength=layer_count + 1)
        ended = np.bincount(self.end, minlength=layer_count + 1)
        return np.cumsum(begun - ended)[:-1].astype(np.float64)

    def holds_both_ends(self, layer_count: int) -> Bools:
        """Whether the devices of each row hold both the first and the last layer."""
        last = np.zeros(len(self), dtype=bool)
        last[self.owner[self.end == layer_count]] = True
        both: Bools = (self.first == 0) & last
        return both

    # -- places by kind -------------------------------------------------------------------------

    @cached_property
    def place_kinds(self) -> tuple[Place, ...]:
        """The distinct places without nodes and devices, which prices do not depend on."""
        return tuple(dict.fromkeys(place.without_node for place in self.places))

    @cached_property
    def place_kind(self) -> Ints:
        """Each row's index into ``place_kinds``."""
        numbers = {kind: number for number, kind in enumerate(self.place_kinds)}
        return np.array([numbers[place.without_node] for place in self.places])[self.place]

    @cached_property
    def zones(self) -> tuple[str, ...]:
        return tuple(sorted({place.zone for place in self.places}))

    @cached_property
    def zone(self) -> Ints:
        """Each row's index into ``zones``, which are sorted by name."""
        numbers = {zone: number for number, zone in enumerate(self.zones)}
        return np.array([numbers[place.zone] for place in self.places])[self.place]

    # -- timed kinds ----------------------------------------------------------------------------

    @cached_property
    def _timed(self) -> tuple[tuple[tuple[str, int, int], ...], Ints]:
        gpus = {gpu: number for number, gpu in enumerate({p.gpu: None for p in self.places})}
        gpu = np.array([gpus[place.gpu] for place in self.places])[self.place]
        rows, kind = distinct_rows(gpu, self.tp, self.samples)
        return (
            tuple(
                (self.places[self.place[row]].gpu, int(self.tp[row]), int(self.samples[row]))
                for row in rows.tolist()
            ),
            kind,
        )

    @property
    def timed(self) -> tuple[tuple[str, int, int], ...]:
        """The distinct combinations of GPU kind, TP degree and samples, which decide times."""
        return self._timed[0]

    @property
    def timing(self) -> Ints:
        """Each row's index into ``timed``."""
        return self._timed[1]


@dataclass(frozen=True, slots=True)
class StageHops:
    """Pairs of rows that exchange activations and gradients, as columns."""

    source: Ints
    target: Ints
    samples: Ints


def distinct_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination of the columns, and each row's index.

    A faster ``np.unique(axis=0, return_index=True, return_inverse=True)``.
    """
    code, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        top = int(column.max(initial=0)) + 1
        if span * top >= 1 << 62:
            code = np.unique(code, return_inverse=True)[1]
            span = len(code)
        code = code * top + column
        span *= top
    _, rows, kind = np.unique(code, return_index=True, return_inverse=True)
    return rows, kind


def range_sums(row: Floats, first: Ints, end: Ints) -> Floats:
    """Return the sum over each range of a row, without subtracting prefix sums."""
    return _reduce_ranges(np.add, row, first, end)


def range_maxima(row: Floats, first: Ints, end: Ints) -> Floats:
    """Return the largest entry in each range of a row."""
    return _reduce_ranges(np.maximum, row, first, end)


def _reduce_ranges(what: np.ufunc, row: Floats, first: Ints, end: Ints) -> Floats:
    # reduceat needs an entry behind the last one.
    cuts = np.stack([first, end], axis=1).ravel()
    found: Floats = what.reduceat(np.append(row, 0.0), cuts)[::2]
    return np.where(first < end, found, 0.0)


def _read(pipeline: Pipeline, size: int, numbers: dict[Place, int], flat: list[int]) -> None:
    for s, stage in enumerate(pipeline.stages):
        first, end = stage.layers
        again, away = stage.recomputed, stage.offloaded
        if len(stage.places) == 1:
            place = numbers.setdefault(stage.places[0], len(numbers))
            flat += (s, 0, place, stage.tp, first, end, size, again, away)
            continue
        for i, (where, samples) in enumerate(zip(stage.places, stage.samples(size), strict=True)):
            place = numbers.setdefault(where, len(numbers))
            flat += (s, i, place, stage.tp, first, end, samples, again, away)


def _split_hops(groups: DeviceGroups) -> StageHops:
    """Return the hops of a plan with split stages, which redistribute a micro batch's samples."""
    found: list[tuple[int, int, int]] = []
    for begin, end in groups.blocks:
        stages: dict[int, list[tuple[int, int, int]]] = {}
        for row in range(begin, end):
            near = stages.setdefault(int(groups.stage[row]), [])
            start = near[-1][2] if near else 0
            near.append((row, start, start + int(groups.samples[row])))
        for s in range(len(stages) - 1):
            found += _match_samples(stages[s], stages[s + 1])
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return StageHops(*np.ascontiguousarray(columns))


def _match_samples(
    ours: Sequence[tuple[int, int, int]], theirs: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return (source, target, samples) for two stages given as (row, first sample, end sample)."""
    return [
        (source, target, min(end, stop) - max(first, begin))
        for source, first, end in ours
        for target, begin, stop in theirs
        if min(end, stop) > max(first, begin)
    ]
