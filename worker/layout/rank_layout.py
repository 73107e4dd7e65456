"""Who holds what of a model under a plan, and who must sum which gradients with whom.

Every tensor that tensor parallelism cuts is cut into the same number of *atoms* under every plan
of a job, its largest TP degree G. A rank with TP degree t and index i holds the atoms from
i·G/t to (i+1)·G/t of each layer of its stage, and all of the tensors that are not cut. Two
replicas of a layer with different TP degrees therefore share whole atoms, and sum their gradients
over *segments*: the coarsest ranges of atoms that no replica's cut divides.

All of this is arithmetic on the plan: no tensor, no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from simulator.documents.problems import Problem
from simulator.inputs.plan_check import check_plan_for_job
from simulator.spec.job import Job
from simulator.spec.plan import Plan, Recompute
from worker.types import LogicalTensor

TIED = -1
"""Stands for a layer: the tensors that layers share. It comes after layer 0 in every order."""

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many elements in the flat memory that holds it."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's place in the plan."""

    rank: int
    pipeline: int
    stage: int
    stages: int
    """How many stages its pipeline has."""
    tp: int
    index: int
    """Which of the ``tp`` ranks of the stage it is."""
    layers: tuple[int, int]
    recompute: Recompute

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks of its stage."""
        return tuple(range(self.rank - self.index, self.rank - self.index + self.tp))


def rank_places(plan: Plan) -> tuple[RankPlace, ...]:
    """Number the ranks of a plan: pipeline by pipeline, stage by stage, index by index."""
    places: list[RankPlace] = []
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            for tp_index in range(stage.tp):
                where = (len(places), number, index, len(pipeline.stages))
                places.append(RankPlace(*where, stage.tp, tp_index, stage.layers, stage.recompute))
    return tuple(places)


def neighbouring_stage(
    places: tuple[RankPlace, ...], place: RankPlace, *, step: int
) -> tuple[RankPlace, ...]:
    """The ranks of the stage before (``step`` -1) or after (1) in the same pipeline."""
    wanted = (place.pipeline, place.stage + step)
    return tuple(other for other in places if (other.pipeline, other.stage) == wanted)


def sender_for(receiver: RankPlace, senders: tuple[RankPlace, ...]) -> RankPlace:
    """From whom a rank takes what all ranks of a neighbouring stage have alike."""
    return senders[receiver.index * len(senders) // receiver.tp]


def receivers_of(sender: RankPlace, receivers: tuple[RankPlace, ...]) -> tuple[RankPlace, ...]:
    """The ranks of a neighbouring stage that take what they need from this one."""
    return tuple(r for r in receivers if r.index * sender.tp // r.tp == sender.index)


def sample_positions(plan: Plan, *, pipeline: int, micro_batch: int) -> range:
    """Where in the global batch the samples of one micro batch stand."""
    before = sum(each.micro_batches for each in plan.pipelines[:pipeline])
    first = (before + micro_batch) * plan.micro_batch_size
    return range(first, first + plan.micro_batch_size)


# -- layers, atoms and their holders --------------------------------------------------------------

Tables = Mapping[int, tuple[LogicalTensor, ...]]
"""For each layer its own tensors, and under ``TIED`` those that are shared, as layer 0 has them."""


def tensors_by_layer(tables: Iterable[tuple[LogicalTensor, ...]]) -> Tables:
    """Divide the tables of all layers into what is a layer's own and what layers share."""
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
    """The layers whose tensors a rank holds, in the order in which gradients are summed."""
    tables = tuple(tables)
    first, end = place.layers
    shared = {spec.tied_name for table in tables for spec in table} - {None}
    uses_shared = (first == 0 and bool(shared)) or any(
        spec.tied_name is not None for table in tables[first:end] for spec in table
    )
    return (*reversed(range(first, end)), *((TIED,) if uses_shared else ()))


def atoms_held(*, tp: int, index: int, atoms: int) -> range:
    """The atoms of each layer that a rank holds."""
    assert atoms % tp == 0, "a TP degree divides the largest one"
    each = atoms // tp
    return range(index * each, (index + 1) * each)


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds some atoms of a layer, and all that is not cut."""

    rank: int
    tp: int
    index: int
    atoms: range


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that hold anything of each layer, under one plan of a job."""

    atoms: int
    tables: Tables
    holders: Mapping[int, tuple[Holder, ...]]

    def has_split(self, layer: int) -> bool:
        return any(spec.split_dim is not None for spec in self.tables[layer])

    def has_unsplit(self, layer: int) -> bool:
        return any(spec.split_dim is None for spec in self.tables[layer])


def holdings_of(plan: Plan, tables: Iterable[tuple[LogicalTensor, ...]], *, atoms: int) -> Holdings:
    """Say who holds which atoms of which layer."""
    tables = tuple(tables)
    holders: dict[int, list[Holder]] = {layer: [] for layer in (*range(len(tables)), TIED)}
    for place in rank_places(plan):
        held = atoms_held(tp=place.tp, index=place.index, atoms=atoms)
        for layer in layers_held(place, tables):
            holders[layer].append(Holder(place.rank, place.tp, place.index, held))
    return Holdings(atoms, tensors_by_layer(tables), {k: tuple(v) for k, v in holders.items()})


# -- what is summed between whom ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients, and weights, that the same ranks hold: what one collective carries."""

    layer: int
    atoms: range
    """Of the tensors that are cut; empty: none of them."""
    with_unsplit: bool
    """The tensors that are not cut are in it too."""
    ranks: tuple[int, ...]
    owner: int
    """The one that keeps the optimizer's moments where only one does."""


def sync_buckets(holdings: Holdings) -> tuple[Bucket, ...]:
    """All sums of a step, in the one order in which every rank starts those it takes part in.

    Layers descend, as the backward pass does; within a layer atoms ascend, and what is not cut
    comes last; what layers share comes at the very end. Groups overlap, so that any other
    agreement than one order for all could let two ranks wait for each other for ever.
    """
    return tuple(part for part in all_buckets(holdings) if len(part.ranks) > 1)


def all_buckets(holdings: Holdings) -> tuple[Bucket, ...]:
    """Everything there is, also what only one rank holds, in the same order.

    Each part is owned by that of its holders who owns least, the largest being dealt out first.
    """
    parts = [
        (layer, *rest)
        for layer in sorted(holdings.holders, reverse=True)
        for rest in _parts_of_layer(holdings, layer)
    ]
    sizes = [_elements(holdings, layer, atoms, whole) for layer, atoms, whole, _ in parts]
    owned: Counter[int] = Counter()
    owners: dict[int, int] = {}
    for number in sorted(range(len(parts)), key=lambda number: (-sizes[number], number)):
        *_, ranks = parts[number]
        owners[number] = min(ranks, key=lambda rank: (owned[rank], rank))
        owned[owners[number]] += sizes[number]
    return tuple(Bucket(*part, owners[number]) for number, part in enumerate(parts))


def _elements(holdings: Holdings, layer: int, atoms: range, with_unsplit: bool) -> int:
    specs = holdings.tables[layer]
    cut = atoms_layout(specs, atoms, atoms=holdings.atoms).elements
    return cut + (unsplit_layout(specs).elements if with_unsplit else 0)


def _parts_of_layer(
    holdings: Holdings, layer: int
) -> Iterator[tuple[range, bool, tuple[int, ...]]]:
    holders = holdings.holders[layer]
    ranks = tuple(holder.rank for holder in holders)
    split, whole = holdings.has_split(layer), holdings.has_unsplit(layer)
    if all(holder.tp == 1 for holder in holders):
        # Nobody cuts this layer: all that it has is one sum between the same ranks.
        if split or whole:
            yield range(holdings.atoms if split else 0), whole, ranks
        return
    if split:
        for segment in segments(holders, atoms=holdings.atoms):
            members = tuple(h.rank for h in holders if segment[0] in h.atoms)
            yield segment, False, members
    if whole:
        yield range(0), True, ranks


def segments(holders: Iterable[Holder], *, atoms: int) -> tuple[range, ...]:
    """The coarsest ranges of atoms of which every holder has all or nothing."""
    cuts = sorted({0, atoms} | {edge for h in holders for edge in (h.atoms.start, h.atoms.stop)})
    return tuple(range(*pair) for pair in pairwise(cuts))


def groups_of(plan: Plan, holdings: Holdings) -> tuple[tuple[int, ...], ...]:
    """All groups of ranks that a plan needs, in the order in which they are opened."""
    places = rank_places(plan)
    groups = {place.tp_ranks: None for place in places if place.tp > 1}
    groups |= {part.ranks: None for part in sync_buckets(holdings)}
    groups |= {tuple(range(len(places))): None} if len(places) > 1 else {}
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class NormShare:
    """What one rank answers for, where several hold the same and exactly one must speak."""

    layer: int
    atoms: tuple[int, ...]
    whole: bool


def norm_shares(holdings: Holdings) -> Mapping[int, tuple[NormShare, ...]]:
    """For each rank, the atoms and whole tensors whose norm it tells in the vote.

    Those with the finest cut speak, since they have an atom in one piece; among equals it goes
    round with the layers.
    """
    found: dict[int, list[NormShare]] = {}
    for layer in sorted(holdings.holders, reverse=True):
        holders = holdings.holders[layer]
        chosen: dict[int, list[int]] = {}
        if holdings.has_split(layer):
            for atom in range(holdings.atoms):
                able = [holder for holder in holders if atom in holder.atoms]
                finest = max(holder.tp for holder in able)
                best = [holder for holder in able if holder.tp == finest]
                chosen.setdefault(best[layer % len(best)].rank, []).append(atom)
        whole = holders[layer % len(holders)].rank if holdings.has_unsplit(layer) else None
        for rank in sorted({*chosen, *(() if whole is None else (whole,))}):
            share = NormShare(layer, tuple(chosen.get(rank, ())), rank == whole)
            found.setdefault(rank, []).append(share)
    return {rank: tuple(shares) for rank, shares in found.items()}


# -- tensors in flat memory -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor, or some atoms of it, lies in flat memory."""

    spec: LogicalTensor
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The flat form of some tensors: the order of the table, aligned, zeros between them."""

    slots: tuple[TensorSlot, ...]
    elements: int


def atoms_layout(specs: Iterable[LogicalTensor], held: range, *, atoms: int) -> FlatLayout:
    """The flat form of some atoms of all tensors that are cut."""
    split = [spec for spec in specs if spec.split_dim is not None]
    return _image((spec, _cut_shape(spec, len(held), atoms)) for spec in split)


def unsplit_layout(specs: Iterable[LogicalTensor]) -> FlatLayout:
    """The flat form of all tensors that are not cut."""
    return _image((spec, spec.shape) for spec in specs if spec.split_dim is None)


def _cut_shape(spec: LogicalTensor, count: int, atoms: int) -> tuple[int, ...]:
    dim = spec.split_dim
    assert dim is not None, "only what is cut has atoms"
    assert spec.shape[dim] % atoms == 0, f"{spec.name} is not padded to whole atoms"
    return (*spec.shape[:dim], spec.shape[dim] // atoms * count, *spec.shape[dim + 1 :])


def _image(shapes: Iterable[tuple[LogicalTensor, tuple[int, ...]]]) -> FlatLayout:
    slots, offset = [], 0
    for spec, shape in shapes:
        slots.append(TensorSlot(spec, offset, shape))
        offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return FlatLayout(tuple(slots), offset)


# -- plans that this runtime cannot run -----------------------------------------------------------


def plan_problems(plan: Plan, job: Job, *, place: str = "plan") -> tuple[Problem, ...]:
    """Say all that keeps this runtime from running the job under the plan."""
    found = list(check_plan_for_job(plan, job, place=place))
    if plan.schedule == "interleaved":
        what = "the interleaved schedule is not supported by the training runtime"
        found.append(Problem(f"{place}: schedule", what, "give 1f1b or gpipe"))
    if job.schedule != "constant" and job.steps is None:
        what = f"the {job.schedule} schedule must know where it ends"
        found.append(Problem("training.steps", what, "give the number of steps"))
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            at = f"{place}: pipelines[{number}].stages[{index}]"
            if stage.split != (1,) or len(stage.places) != 1:
                what = "a stage that divides its micro batches is not supported by the runtime"
                found.append(Problem(f"{at}.split", what, "give split [1], or more pipelines"))
            if job.max_tp % stage.tp:
                what = f"{stage.tp} does not divide the job's largest TP degree of {job.max_tp}"
                divisors = [str(n) for n in range(1, job.max_tp + 1) if job.max_tp % n == 0]
                found.append(Problem(f"{at}.tp", what, f"possible are {', '.join(divisors)}"))
    return tuple(found)
