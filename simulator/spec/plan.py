"""A plan: pipelines of stages, each with its layers, place, TP degree and micro batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from simulator.models.layers import Recompute

Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]


PlaceKey = tuple[str, str, str]
"""GPU kind, machine type and zone."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a device group runs: GPU kind, machine type and zone; in a placed plan also a node."""

    gpu: str
    machine: str
    zone: str
    node: str | None = None
    devices: tuple[int, ...] = ()

    @property
    def key(self) -> PlaceKey:
        return (self.gpu, self.machine, self.zone)

    @property
    def without_node(self) -> Place:
        """The place without node and devices."""
        return self if self.node is None and not self.devices else Place(*self.key)


class Located:
    """Something at a place that no node is named for."""

    __slots__ = ()
    gpu: str
    machine: str
    zone: str

    @property
    def key(self) -> PlaceKey:
        return (self.gpu, self.machine, self.zone)

    @property
    def place(self) -> Place:
        return Place(*self.key)


@dataclass(frozen=True, slots=True)
class Stage:
    """A range of layers on one device group, or on several that split each micro batch."""

    layers: tuple[int, int]
    """The first layer, and the one after the last."""
    tp: int
    places: tuple[Place, ...]
    """One place per share of ``split``; almost always one."""
    recompute: Recompute | int = "none"
    """A number: that of its first layers only."""
    split: tuple[int, ...] = (1,)
    """Relative shares of each micro batch's samples, one per place."""
    offload: int = 0
    """How many layers after the recomputed ones keep their activations in the host's memory until
    their backward (ADR 124)."""

    @property
    def place(self) -> Place:
        """The only place of a stage that is not split."""
        assert len(self.places) == 1, "a split stage has several places"
        return self.places[0]

    @property
    def device_count(self) -> int:
        return self.tp * len(self.places)

    @property
    def recomputed(self) -> int:
        """How many of its layers, from the first on, are recomputed in the backward pass."""
        if isinstance(self.recompute, int):
            return self.recompute
        return self.layers[1] - self.layers[0] if self.recompute == "full" else 0

    @property
    def offloaded(self) -> int:
        """How many of its layers are offloaded: those after the recomputed ones."""
        return max(0, min(self.offload, self.layers[1] - self.layers[0] - self.recomputed))

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """Samples of a micro batch that each place computes."""
        total = sum(self.split)
        return tuple(micro_batch_size * share // total for share in self.split)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica of the whole model, with its own number of micro batches."""

    micro_batches: int
    stages: tuple[Stage, ...]
    micro_batch_size: int | None = None
    """Samples of its micro batches; ``None``: as many as in the plan."""


def equal_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """The boundaries of equal stages; layers that remain go one each to the last stages."""
    each, rest = divmod(layers, stages)
    sizes = (each + (stage >= stages - rest) for stage in range(stages))
    return tuple(accumulate(sizes, initial=0))


def linked_by_zones(zones: Sequence[set[str]]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of sets that share a zone, directly or through others, in their order."""
    groups: list[tuple[list[int], set[str]]] = []
    for index, own in enumerate(zones):
        linked = [group for group in groups if group[1] & own]
        members = sorted(index for group in linked for index in group[0])
        every = own.union(*(group[1] for group in linked))
        groups = [group for group in groups if not group[1] & own]
        groups.append(([*members, index], every))
    return tuple(sorted(tuple(members) for members, _ in groups))


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job runs; pipelines may differ in everything."""

    micro_batch_size: int
    """Samples of a micro batch, in pipelines that state no size of their own."""
    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    """Chunks per device group. Above one only with the interleaved schedule, where the stages k,
    k + D, k + 2D, ... of a pipeline with D device groups share one device group."""
    together: int | None = None
    """How many equal pipelines take machines together, stage by stage, before the next do; ``None``
    for all. With 1, the stages of each pipeline are side by side. Named nodes take precedence."""
    sequence_parallel: bool = False
    """The ranks of a stage with a TP degree above 1 share the tokens between split parts."""
    zero: Literal[0, 1] | None = None
    """The ZeRO stage; ``None``: that of the job."""
    outer_every: int | None = None
    """Iterations between two outer steps, in which all pipelines average their parameters; in
    between, only those of one outer group sum gradients (ADR 118). ``None``: no outer steps."""

    @property
    def samples_per_iteration(self) -> int:
        return sum(self.samples_of(pipeline) for pipeline in self.pipelines)

    def size_of(self, pipeline: Pipeline) -> int:
        """Samples of a pipeline's micro batches."""
        return pipeline.micro_batch_size or self.micro_batch_size

    def samples_of(self, pipeline: Pipeline) -> int:
        """Samples that a pipeline computes in an iteration."""
        return self.size_of(pipeline) * pipeline.micro_batches

    @property
    def size_by_pipeline(self) -> tuple[int, ...]:
        """The micro batch size of each pipeline."""
        return tuple(map(self.size_of, self.pipelines))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different micro batch sizes, in rising order."""
        return tuple(sorted(set(self.size_by_pipeline)))

    @property
    def offloads(self) -> bool:
        """Whether activations of some stages wait in the memory of their hosts."""
        return any(stage.offload for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def outer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the pipelines that sum gradients together in each iteration.

        With outer steps, those that share a zone, directly or through others; else all.
        """
        if self.outer_every is None:
            return (tuple(range(len(self.pipelines))),)
        zones = (
            {place.zone for stage in pipeline.stages for place in stage.places}
            for pipeline in self.pipelines
        )
        return linked_by_zones(list(zones))

    def with_outer_steps(self, every: int) -> Plan:
        """The plan with outer steps; itself where all pipelines would be one outer group."""
        plan = replace(self, outer_every=every)
        return plan if len(plan.outer_groups) > 1 else self

    def outer_group(self, pipelines: Sequence[int]) -> Plan:
        """The plan of some of its pipelines, which take no outer steps."""
        chosen = tuple(self.pipelines[p] for p in pipelines)
        return replace(self, pipelines=chosen, outer_every=None)

    def group_count(self, pipeline: Pipeline) -> int:
        """Number of device groups; the chunks of one group count once."""
        return len(pipeline.stages) // self.virtual_stages

    def owning_stages(self, pipeline: Pipeline) -> tuple[Stage, ...]:
        """One stage per device group."""
        return pipeline.stages[: self.group_count(pipeline)]

    def chunks(self, pipeline: Pipeline) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each device group: one, or several chunks."""
        if self.virtual_stages == 1:
            return tuple(zip(pipeline.stages, strict=True))
        groups = self.group_count(pipeline)
        return tuple(pipeline.stages[group::groups] for group in range(groups))

    def gpus_used(self) -> dict[str, int]:
        """Devices by ``"<gpu>@<zone>"``, sorted by name."""
        used: dict[str, int] = {}
        for pipeline in self.pipelines:
            for stage in self.owning_stages(pipeline):
                for place in stage.places:
                    key = f"{place.gpu}@{place.zone}"
                    used[key] = used.get(key, 0) + stage.tp
        return dict(sorted(used.items()))

    @property
    def device_count(self) -> int:
        return sum(self.gpus_used().values())


def with_sizes(plan: Plan, sizes: Sequence[int]) -> Plan:
    """The plan whose pipelines have these micro batch sizes, in the one way in which it is written.

    The size of most pipelines is the plan's; of several such, the smallest.
    """
    usual = min(Counter(sizes).items(), key=lambda pair: (-pair[1], pair[0]))[0]
    own = [None if size == usual else size for size in sizes]
    if plan.micro_batch_size == usual and own == [p.micro_batch_size for p in plan.pipelines]:
        return plan
    # Equal pipelines stay one object: estimates read each once.
    known: dict[tuple[int, int | None], Pipeline] = {}
    pipelines = [
        known.setdefault((id(pipeline), size), replace(pipeline, micro_batch_size=size))
        for pipeline, size in zip(plan.pipelines, own, strict=True)
    ]
    return replace(plan, micro_batch_size=usual, pipelines=tuple(pipelines))
