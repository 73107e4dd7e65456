"""A plan: which layers run where, how they are cut, how many micro batches a pipeline takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "full"]
Schedule = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """What runs one device group: a GPU kind in a machine type in a zone, later a node of it."""

    gpu: str
    machine: str
    zone: str
    node: str | None = None
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """A range of layers on one device group, or on several that divide each micro batch."""

    layers: tuple[int, int]
    """First layer and the one after the last."""
    tp: int
    places: tuple[Place, ...]
    """One place per share of ``split``; almost always just one."""
    recompute: Recompute = "none"
    split: tuple[int, ...] = (1,)
    """Relative shares of each micro batch's samples, one per place."""

    @property
    def place(self) -> Place:
        """The place of a stage that is not split."""
        assert len(self.places) == 1, "a split stage has several places"
        return self.places[0]

    @property
    def device_count(self) -> int:
        return self.tp * len(self.places)

    def samples(self, micro_batch_size: int) -> tuple[int, ...]:
        """How many samples of a micro batch each place works on."""
        total = sum(self.split)
        return tuple(micro_batch_size * share // total for share in self.split)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica of the whole model, with its own number of micro batches."""

    micro_batches: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one job runs: every pipeline may differ from the others in everything."""

    micro_batch_size: int
    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    """Chunks per device group; more than one only with the interleaved schedule, where the
    stages k, k + D, k + 2D, ... of a pipeline of D device groups share one device group."""

    @property
    def samples_per_iteration(self) -> int:
        return self.micro_batch_size * sum(p.micro_batches for p in self.pipelines)

    def group_count(self, pipeline: Pipeline) -> int:
        """Number of stages that own devices (chunks of one device group count once)."""
        return len(pipeline.stages) // self.virtual_stages

    def owning_stages(self, pipeline: Pipeline) -> tuple[Stage, ...]:
        """The stages that stand for distinct device groups."""
        return pipeline.stages[: self.group_count(pipeline)]

    def gpus_used(self) -> dict[str, int]:
        """Count devices by ``"<gpu>@<zone>"``, in the order of their names."""
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
