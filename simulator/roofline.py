"""Layer times computed from work, traffic and launches, where nothing was measured.

A layer's forward is its matrix products at a share of the GPU's peak, plus its other memory
traffic at a share of the memory's bandwidth, plus its tensor-parallel all-reduces, and never
less than the time to launch its kernels. The two shares were fitted per GPU kind on measured
profiles (``simulator/data/calibration.toml`` says on which, and how far off they are).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from simulator.catalogue import Catalogue
from simulator.files import built_in_table
from simulator.hardware import Gpu
from simulator.model import Model, Precision
from simulator.network import Network
from simulator.plan import Place
from simulator.profile import Row
from simulator.provenance import Provenance

OPTIMIZER_BYTES: Mapping[str, int] = {"fp32": 28, "bf16": 32, "fp16": 32}
"""Read and written per parameter by Adam: weight, gradient, two moments, and a 16-bit copy."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds of one micro batch per layer, and of an optimizer step per parameter."""

    forward: Row
    backward: Row
    optimizer_s_per_parameter: float
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much of its peaks a GPU kind reaches, and how far off that is."""

    compute_share: float
    traffic_share: float
    launch_s: float
    relative_error: float
    fitted_on: str


@cache
def calibrations() -> Mapping[str, Calibration]:
    """The fitted shares by GPU kind; ``default`` stands for kinds that nobody measured."""
    return {
        name: Calibration(
            compute_share=entry["compute_share"],
            traffic_share=entry["traffic_share"],
            launch_s=entry["launch_s"],
            relative_error=entry["relative_error"],
            fitted_on=entry["fitted_on"],
        )
        for name, entry in built_in_table("calibration.toml")["gpu"].items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Roofline:
    """Computes layer times of one model under one sequence length and precision."""

    model: Model
    sequence: int
    precision: Precision
    flash: bool
    catalogue: Catalogue
    network: Network

    def under(self, *, sequence: int, precision: Precision) -> Roofline:
        """The same model under other conditions."""
        return replace(self, sequence=sequence, precision=precision)

    def times(self, gpu: str, *, tp: int, micro_batch: int) -> LayerTimes:
        """Times on ``tp`` GPUs of a kind in one machine, for one micro batch."""
        calibration = calibrations().get(gpu, calibrations()["default"])
        gpu_facts = self.catalogue.gpu(gpu)
        forward = np.array(
            [
                self._forward(index, gpu_facts, calibration, tp, micro_batch)
                for index in range(len(self.model.layers))
            ]
        )
        collectives = np.array(
            [self._collectives(index, gpu, tp, micro_batch) for index in range(len(forward))]
        )
        floor = calibration.launch_s
        note = f"{gpu}: computed, not measured (calibrated on {calibration.fitted_on})"
        return LayerTimes(
            np.maximum(forward + collectives[:, 0], floor),
            np.maximum(2 * forward + collectives[:, 1], floor),
            self.optimizer_s_per_parameter(gpu),
            Provenance("analytic", calibration.relative_error, (note,)),
        )

    def optimizer_s_per_parameter(self, gpu: str) -> float:
        """Adam is bound by memory: the bytes it touches at the GPU's usual bandwidth."""
        calibration = calibrations().get(gpu, calibrations()["default"])
        bandwidth = self.catalogue.gpu(gpu).memory_bandwidth_bytes_per_s
        return OPTIMIZER_BYTES[self.precision] / (bandwidth * calibration.traffic_share)

    def _forward(
        self, index: int, gpu: Gpu, calibration: Calibration, tp: int, micro_batch: int
    ) -> float:
        layer = self.model.layers[index]
        flops = layer.forward_flops(micro_batch=micro_batch, sequence=self.sequence, tp=tp)
        traffic = layer.memory_traffic_bytes(
            micro_batch=micro_batch,
            sequence=self.sequence,
            tp=tp,
            precision=self.precision,
            flash=self.flash,
        )
        return flops / (peak_flops(gpu, self.precision) * calibration.compute_share) + traffic / (
            gpu.memory_bandwidth_bytes_per_s * calibration.traffic_share
        )

    def _collectives(self, index: int, gpu: str, tp: int, micro_batch: int) -> tuple[float, float]:
        if tp == 1:
            return 0.0, 0.0
        layer = self.model.layers[index]
        width = 4 if self.precision == "fp32" else 2
        seconds = self.network.all_reduce_within(
            Place(gpu, "", ""),
            gpus=tp,
            total_bytes=width
            * layer.allreduce_elements(micro_batch=micro_batch, sequence=self.sequence),
        )
        return layer.allreduces_forward * seconds, layer.allreduces_backward * seconds


def peak_flops(gpu: Gpu, precision: str) -> float:
    """The peak of matrix products in a precision; fp32 runs as TF32 where there is one."""
    order = {
        "fp32": ("tf32", "fp32"),
        "bf16": ("bf16", "tf32", "fp32"),
        "fp16": ("fp16", "bf16", "fp32"),
    }[precision]
    return next(gpu.peak_flops[name] for name in order if name in gpu.peak_flops)
