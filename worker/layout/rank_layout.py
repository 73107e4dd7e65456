"""Which rank holds which part of the model under a plan, and which ranks sum which gradients.

Every tensor that tensor parallelism splits has the same number of *atoms* under every plan of a
job: the job's largest TP degree G. A rank with TP degree t and index i holds atoms i·G/t to
(i+1)·G/t of each layer of its stage, and every unsplit tensor. Two replicas of a layer with
different TP degrees therefore have whole atoms in common. They sum their gradients over *segments*:
the coarsest ranges of atoms that no replica's split divides.

This is arithmetic on the plan and needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from simulator.documents.problems import Problem
from simulator.inputs.plan_check import check_plan_for_job
from simulator.models.layers import divisors
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.types import LogicalTensor

TIED = -1
"""Stands for the layer number of tensors that layers share; ordered after layer 0."""

ALIGNMENT = 64
"""Each tensor starts at a multiple of 64 elements in its flat buffer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of a rank's stages: it has several under the interleaved schedule."""

    stage: int
    layers: tuple[int, int]
    """The first layer, and the one after the last."""
    recomputed: int
    """How many of them, from the first on, are recomputed in the backward pass."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's position in the plan."""

    rank: int
    pipeline: int
    stage: int
    """Its first stage, which is the number of its device group."""
    stages: int
    """The number of stages of its pipeline."""
    tp: int
    index: int
    """Its TP index among the ``tp`` ranks of the stage."""
    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it computes, ascending."""
        return tuple(layer for chunk in self.chunks for layer in range(*chunk.layers))

    @property
    def groups(self) -> int:
        """The number of device groups of its pipeline."""
        return self.stages // len(self.chunks)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.chunks[-1].stage == self.stages - 1

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks of its stage group."""
        return tuple(range(self.rank - self.index, self.rank - self.index + self.tp))


def rank_places(plan: Plan) -> tuple[RankPlace, ...]:
    """Number the ranks of a plan by pipeline, then stage, then TP index."""
    places: list[RankPlace] = []
    for number, pipeline in enumerate(plan.pipelines):
        chunks = [
            Chunk(index, stage.layers, stage.recomputed)
            for index, stage in enumerate(pipeline.stages)
        ]
        owning = plan.owning_stages(pipeline)
        for index, stage in enumerate(owning):
            mine = tuple(chunks[index :: len(owning)])
            for tp_index in range(stage.tp):
                where = (len(places), number, index, len(pipeline.stages))
                places.append(RankPlace(*where, stage.tp, tp_index, mine))
    return tuple(places)


def neighbouring_stage(
    places: tuple[RankPlace, ...], place: RankPlace, *, step: int
) -> tuple[RankPlace, ...]:
    """Return the ranks of the previous (``step`` -1) or next (1) stage of the same pipeline.

    With several chunks, the first device group comes after the last.
    """
    stage = place.stage + step
    wanted = (place.pipeline, stage % place.groups if len(place.chunks) > 1 else stage)
    return tuple(other for other in places if (other.pipeline, other.stage) == wanted)


def sender_for(receiver: RankPlace, senders: tuple[RankPlace, ...]) -> RankPlace:
    """Return the rank from which ``receiver`` takes a tensor that all ``senders`` hold."""
    return senders[receiver.index * len(senders) // receiver.tp]


def receivers_of(sender: RankPlace, receivers: tuple[RankPlace, ...]) -> tuple[RankPlace, ...]:
    """Return the ranks of a neighbouring stage that receive from ``sender``."""
    return tuple(r for r in receivers if r.index * sender.tp // r.tp == sender.index)


def sample_positions(plan: Plan, *, pipeline: int, micro_batch: int) -> range:
    """Return the positions of a micro batch's samples in the global batch."""
    size = plan.size_of(plan.pipelines[pipeline])
    first = sum(map(plan.samples_of, plan.pipelines[:pipeline])) + micro_batch * size
    return range(first, first + size)


# -- holders of layers and atoms --- --------------------------------------------------------------

Tables = Mapping[int, tuple[LogicalTensor, ...]]
"""The tensors of each layer; shared ones are listed under ``TIED``, in layer 0's form."""


def tensors_by_layer(tables: Iterable[tuple[LogicalTensor, ...]]) -> Tables:
    """Separate each layer's own tensors from those that layers share."""
    tables = tuple(tables)
    shared = {spec.tied_name for table in tables for spec in table} - {None}
    own = {
        index: tuple(
            spec
            for spec in table
            if spec.tied_name is None and not (index == 0 and spec.name in shared)
        )
        for index, table in enumerate(tables)
    }
    return {**own, TIED: tuple(spec for spec in tables[0] if spec.name in shared)}


def layers_held(place: RankPlace, tables: Iterable[tuple[LogicalTensor, ...]]) -> tuple[int, ...]:
    """Return the layers whose tensors a rank holds, in the order of the gradient sums."""
    tables = tuple(tables)
    shared = {spec.tied_name for table in tables for spec in table} - {None}
    uses_shared = (place.is_first and bool(shared)) or any(
        spec.tied_name is not None for layer in place.layers for spec in tables[layer]
    )
    return (*reversed(place.layers), *((TIED,) if uses_shared else ()))


def atoms_held(*, tp: int, index: int, atoms: int) -> range:
    """Return the atoms of each layer that a rank holds."""
    assert atoms % tp == 0, "a TP degree must divide the largest one"
    each = atoms // tp
    return range(index * each, (index + 1) * each)


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds some atoms and every unsplit tensor of a layer."""

    rank: int
    tp: int
    index: int
    atoms: range


@dataclass(frozen=True, slots=True)
class Holdings:
    """The holders of each layer under one plan."""

    atoms: int
    tables: Tables
    holders: Mapping[int, tuple[Holder, ...]]

    def has_split(self, layer: int) -> bool:
        return any(spec.split_dim is not None for spec in self.tables[layer])

    def has_unsplit(self, layer: int) -> bool:
        return any(spec.split_dim is None for spec in self.tables[layer])


def holdings_of(plan: Plan, tables: Iterable[tuple[LogicalTensor, ...]], *, atoms: int) -> Holdings:
    """Compute which rank holds which atoms of which layer."""
    tables = tuple(tables)
    holders: dict[int, list[Holder]] = {layer: [] for layer in (*range(len(tables)), TIED)}
    for place in rank_places(plan):
        held = atoms_held(tp=place.tp, index=place.index, atoms=atoms)
        for layer in layers_held(place, tables):
            holders[layer].append(Holder(place.rank, place.tp, place.index, held))
    return Holdings(atoms, tensors_by_layer(tables), {k: tuple(v) for k, v in holders.items()})


# -- gradient sums --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients and weights that the same ranks hold, carried by one collective."""

    layer: int
    atoms: range
    """The atoms of split tensors in it; may be empty."""
    with_unsplit: bool
    """Whether it includes the unsplit tensors."""
    ranks: tuple[int, ...]
    owner: int
    """The rank that reports the norm of its gradients; under ZeRO-1 it alone gets their sum, keeps
    the optimizer's moments and updates the weights."""


def sync_buckets(holdings: Holdings) -> tuple[Bucket, ...]:
    """Return the gradient sums of a step in the order in which every rank starts its own.

    Layers descend, as in the backward pass. Within a layer atoms ascend, followed by the unsplit
    tensors; tensors that layers share come last. Groups overlap, so two ranks that started their
    sums in different orders could deadlock.
    """
    return tuple(part for part in all_buckets(holdings) if len(part.ranks) > 1)


def all_buckets(holdings: Holdings) -> tuple[Bucket, ...]:
    """Return all buckets in the order of the sums, including those that only one rank holds.

    Largest first, each bucket is assigned to the one of its holders that owns the fewest elements.
    """
    parts = [
        (layer, *rest)
        for layer in sorted(holdings.holders, reverse=True)
        for rest in _buckets_of_layer(holdings, layer)
    ]
    sizes = []
    for layer, atoms, with_unsplit, _ in parts:
        specs = holdings.tables[layer]
        split = atoms_layout(specs, atoms, atoms=holdings.atoms).elements
        sizes.append(split + (unsplit_layout(specs).elements if with_unsplit else 0))
    owned: Counter[int] = Counter()
    owners: dict[int, int] = {}
    for number in sorted(range(len(parts)), key=lambda number: (-sizes[number], number)):
        *_, ranks = parts[number]
        owners[number] = min(ranks, key=lambda rank: (owned[rank], rank))
        owned[owners[number]] += sizes[number]
    return tuple(Bucket(*part, owners[number]) for number, part in enumerate(parts))


def _buckets_of_layer(
    holdings: Holdings, layer: int
) -> Iterator[tuple[range, bool, tuple[int, ...]]]:
    holders = holdings.holders[layer]
    ranks = tuple(holder.rank for holder in holders)
    split, unsplit = holdings.has_split(layer), holdings.has_unsplit(layer)
    if all(holder.tp == 1 for holder in holders):
        # No holder splits this layer, so one sum covers all of it.
        if split or unsplit:
            yield range(holdings.atoms if split else 0), unsplit, ranks
        return
    if split:
        for segment in segments(holders, atoms=holdings.atoms):
            members = tuple(h.rank for h in holders if segment[0] in h.atoms)
            yield segment, False, members
    if unsplit:
        yield range(0), True, ranks


def segments(holders: Iterable[Holder], *, atoms: int) -> tuple[range, ...]:
    """Return the coarsest ranges of atoms that each holder has in full or not at all."""
    cuts = sorted({0, atoms} | {edge for h in holders for edge in (h.atoms.start, h.atoms.stop)})
    return tuple(range(*pair) for pair in pairwise(cuts))


def groups_of(plan: Plan, holdings: Holdings) -> tuple[tuple[int, ...], ...]:
    """Return all process groups that a plan needs, in the order in which they are opened."""
    places = rank_places(plan)
    groups = {place.tp_ranks: None for place in places if place.tp > 1}
    groups |= {part.ranks: None for part in sync_buckets(holdings)}
    groups |= {tuple(range(len(places))): None} if len(places) > 1 else {}
    return tuple(groups)


def channels_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return all (source, target) of a plan's transfers, in the order in which they are opened."""
    places = rank_places(plan)
    found = set()
    for place in places:
        for step in (-1, 1):
            senders = neighbouring_stage(places, place, step=step)
            if senders:
                found.add((sender_for(place, senders).rank, place.rank))
    return tuple(sorted(found))


# -- flat buffers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of a tensor, or of some of its atoms, in a flat buffer."""

    spec: LogicalTensor
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of several tensors in a flat buffer: in table order, aligned, zero-padded."""

    slots: tuple[TensorSlot, ...]
    elements: int


def atoms_layout(specs: Iterable[LogicalTensor], held: range, *, atoms: int) -> FlatLayout:
    """Return the flat layout of some atoms of the split tensors."""
    split = [spec for spec in specs if spec.split_dim is not None]
    return _layout((spec, _split_shape(spec, len(held), atoms)) for spec in split)


def unsplit_layout(specs: Iterable[LogicalTensor]) -> FlatLayout:
    """Return the flat layout of the unsplit tensors."""
    return _layout((spec, spec.shape) for spec in specs if spec.split_dim is None)


def piece_layout(specs: Iterable[LogicalTensor], piece: int, *, atoms: int) -> FlatLayout:
    """Return the flat layout of a piece: one atom, or the unsplit tensors as the last piece."""
    if piece == atoms:
        return unsplit_layout(specs)
    return atoms_layout(specs, range(piece, piece + 1), atoms=atoms)


def _split_shape(spec: LogicalTensor, count: int, atoms: int) -> tuple[int, ...]:
    dim = spec.split_dim
    assert dim is not None, "only split tensors have atoms"
    assert spec.shape[dim] % atoms == 0, f"{spec.name} is not padded to whole atoms"
    return (*spec.shape[:dim], spec.shape[dim] // atoms * count, *spec.shape[dim + 1 :])


def _layout(shapes: Iterable[tuple[LogicalTensor, tuple[int, ...]]]) -> FlatLayout:
    slots, offset = [], 0
    for spec, shape in shapes:
        slots.append(TensorSlot(spec, offset, shape))
        offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return FlatLayout(tuple(slots), offset)


# -- unsupported plans --------------- -----------------------------------------------------------


def plan_problems(plan: Plan, job: Job, *, place: str = "plan") -> tuple[Problem, ...]:
    """List everything that prevents this runtime from running the job under the plan."""
    found = list(check_plan_for_job(plan, job, place=place))
    if job.schedule != "constant" and job.steps is None:
        what = f"the {job.schedule} schedule needs an end"
        found.append(Problem("training.steps", what, "set the number of steps"))
    if plan.zero not in (None, job.zero):
        what = f"is {plan.zero}, but the job trains with zero = {job.zero}"
        cure = f"set training.zero = {plan.zero} in the job, or leave it out"
        found.append(Problem(f"{place}: zero", what, cure))
    if plan.schedule == "zero-bubble":
        what = "is zero-bubble, which no runtime runs yet"
        found.append(Problem(f"{place}: schedule", what, 'give "1f1b", or leave it out'))
    if plan.outer_every is not None:
        what = f"is {plan.outer_every}, and no runtime takes outer steps yet"
        found.append(Problem(f"{place}: outer_every", what, "leave it out"))
    for number, pipeline in enumerate(plan.pipelines):
        if plan.schedule == "interleaved" and plan.group_count(pipeline) == 1:
            what = "has one device group, so chunks would shorten no wait"
            cure = "give each pipeline of an interleaved plan two device groups, or use 1f1b"
            found.append(Problem(f"{place}: pipelines[{number}].stages", what, cure))
        for index, stage in enumerate(pipeline.stages):
            at = f"{place}: pipelines[{number}].stages[{index}]"
            if stage.split != (1,) or len(stage.places) != 1:
                what = "stages that split micro batches are not supported by the runtime"
                found.append(Problem(f"{at}.split", what, "use split [1], or more pipelines"))
            if stage.offload:
                what = f"is {stage.offload}, and no runtime offloads activations yet"
                found.append(Problem(f"{at}.offload", what, "leave it out"))
            # For jobs of our own runtime the check of any plan finds it.
            if job.max_tp % stage.tp and job.runtime != "sailor":
                what = f"{stage.tp} does not divide the job's largest TP degree of {job.max_tp}"
                cure = f"use one of {', '.join(map(str, divisors(job.max_tp)))}"
                found.append(Problem(f"{at}.tp", what, cure))
    return tuple(found)
