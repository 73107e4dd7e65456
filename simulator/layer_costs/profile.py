"""A profile: measured times and sizes of a model's layers on real GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.arrays import Floats
from simulator.models.layers import Precision


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per layer for one micro batch, on ``tp`` GPUs of one kind in one machine."""

    forward_s: Floats
    backward_s: Floats
    optimizer_s: float | None
    """The optimizer step over ``Profile.optimizer_parameters[tp]`` parameters, if measured."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Element counts per layer and TP rank, for one sample."""

    parameters: tuple[int, ...]
    output_elements: tuple[int, ...]
    kept_elements: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measured times and sizes of a model with the layers embedding, blocks and head."""

    name: str
    sequence: int
    precision: Precision
    layer_names: tuple[str, ...]
    timings: Mapping[tuple[str, int, int], Timing]
    """By (GPU kind, TP degree, micro batch)."""
    sizes: Mapping[int, LayerSizes]
    """By TP degree."""
    optimizer_parameters: Mapping[int, int]
    """Parameters per TP rank of the model whose optimizer step was timed, by TP degree."""
    config: Mapping[str, Any]
    flash_attention: bool = False

    def micro_batches(self, gpu: str, tp: int) -> list[int]:
        """Return the micro batch sizes measured on this GPU kind at this TP degree."""
        return sorted(b for kind, degree, b in self.timings if (kind, degree) == (gpu, tp))

    def degrees(self, gpu: str) -> list[int]:
        """Return the TP degrees measured on this GPU kind."""
        return sorted({degree for kind, degree, _ in self.timings if kind == gpu})

    def gpus(self) -> list[str]:
        return sorted({kind for kind, _, _ in self.timings})
