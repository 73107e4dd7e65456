"""Layer times computed from work, traffic and launches, where nothing was measured.

Forward and backward together are the layer's matrix products at a share of the GPU's peak, plus
its other memory traffic at a share of the memory's bandwidth, both three times what forward does
alone; to each direction come its tensor-parallel all-reduces, and it takes no less than the time
to launch its kernels. The shares were fitted per GPU kind on measured profiles
(``simulator/data/calibration.toml`` says on which, and how far off they are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from simulator.arrays import Floats
from simulator.documents.files import built_in_table
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.types import Gpu
from simulator.models.layers import FLOAT_BYTES, Layer, Model, Precision
from simulator.network.network import Network
from simulator.spec.plan import Place
from simulator.spec.provenance import Provenance

OPTIMIZER_BYTES: Mapping[str, int] = {"fp32": 28, "bf16": 32, "fp16": 32}
"""Read and written per parameter by Adam: weight, gradient, two moments, and a 16-bit copy."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds of one micro batch per layer, and of an optimizer step per parameter."""

    forward: Floats
    backward: Floats
    optimizer_s_per_parameter: float
    provenance: Provenance


OTHER_PRECISION_ERROR = 0.4
"""Error bar where the shares, all fitted on fp32 runs, are applied to another precision."""


SIXTEEN_BIT_SHARE_MAX = 0.7
"""No more of the peak than this in bf16 and fp16, an assumption: the peak is twice or more that
of fp32, and what feeds it no faster."""


END_KERNELS = 0.25
"""Kernels of an embedding or a head next to those of a block: at one sample an embedding took
0.2 to 0.4 ms where a block took 1.2 to 2.3 (SOSP'25 artefact profiles of OPT-350M at TP 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What layers ask of a GPU, in seconds at its peaks; one entry per layer."""

    compute_s: Floats
    """Matrix products of one forward pass at the peak rate."""
    traffic_s: Floats
    """Other memory traffic of one forward pass at the peak bandwidth."""
    collectives_forward_s: Floats
    collectives_backward_s: Floats
    kernels: Floats
    """How many kernels the layer launches, next to a block."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much of its peaks a GPU kind reaches, and how far off that is."""

    compute_share: float
    traffic_share: float
    collective_factor: float
    """All-reduces inside a machine take this times what the links between its GPUs say."""
    backward_ratio: float
    """Backward over forward, collectives apart; their sum is three forward passes."""
    launch_s: float
    relative_error: float
    fitted_on: str

    def seconds(self, demand: Demand) -> tuple[Floats, Floats]:
        """Forward and backward of each layer."""
        both = 3 * (demand.compute_s / self.compute_share + demand.traffic_s / self.traffic_share)
        ahead = both / (1 + self.backward_ratio)
        forward = ahead + self.collective_factor * demand.collectives_forward_s
        backward = both - ahead + self.collective_factor * demand.collectives_backward_s
        floor = self.launch_s * demand.kernels
        return np.maximum(forward, floor), np.maximum(backward, floor)


@cache
def calibrations() -> Mapping[str, Calibration]:
    """The fitted shares by GPU kind; ``default`` stands for kinds that nobody measured."""
    return {
        name: Calibration(
            compute_share=entry["compute_share"],
            traffic_share=entry["traffic_share"],
            collective_factor=entry["collective_factor"],
            backward_ratio=entry["backward_ratio"],
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
        error = calibration.relative_error
        note = f"{gpu}: computed, not measured (calibrated on {calibration.fitted_on})"
        if self.precision != "fp32":
            share = min(calibration.compute_share, SIXTEEN_BIT_SHARE_MAX)
            calibration = replace(calibration, compute_share=share)
            error = max(error, OTHER_PRECISION_ERROR)
            note += f"; the shares are those of fp32, the job is {self.precision}"
        demand = self.demand(gpu, tp=tp, micro_batch=micro_batch)
        forward, backward = calibration.seconds(demand)
        return LayerTimes(
            forward,
            backward,
            self.optimizer_s_per_parameter(gpu),
            Provenance("analytic", error, (note, *self._cautions(gpu, forward, calibration))),
        )

    def _cautions(self, gpu: str, forward: Floats, calibration: Calibration) -> Iterator[str]:
        """What a user of these times should know beside where they come from."""
        peaks = self.catalogue.gpu(gpu).peak_flops
        if self.precision not in peaks:
            yield f"{gpu} has no {self.precision} in hardware: it is computed as fp32"
        elif self.precision == "fp32" and "tf32" in peaks:
            yield f"{gpu}: matrix products in fp32 run as TF32 (torch must be told to allow it)"
        if np.median(forward) <= calibration.launch_s:
            yield (
                f"{gpu}: launching kernels sets the pace, not the GPU; a larger micro batch "
                "would take hardly longer"
            )

    def demand(self, gpu: str, *, tp: int, micro_batch: int) -> Demand:
        """What every layer asks of one of ``tp`` GPUs of a kind."""
        facts = self.catalogue.gpu(gpu)
        layers = self.model.layers
        flops = [
            layer.forward_flops(micro_batch=micro_batch, sequence=self.sequence, tp=tp)
            for layer in layers
        ]
        traffic = [
            layer.memory_traffic_bytes(
                micro_batch=micro_batch,
                sequence=self.sequence,
                tp=tp,
                precision=self.precision,
                flash=self.flash,
            )
            for layer in layers
        ]
        collectives = [self._collectives(layer, gpu, tp, micro_batch) for layer in layers]
        return Demand(
            np.array(flops) / peak_flops(facts, self.precision),
            np.array(traffic) / facts.memory_bandwidth_bytes_per_s,
            np.array([forward for forward, _ in collectives]),
            np.array([backward for _, backward in collectives]),
            np.array([1.0 if layer.kind == "block" else END_KERNELS for layer in layers]),
        )

    def optimizer_s_per_parameter(self, gpu: str) -> float:
        """Adam is bound by memory: the bytes it touches at the GPU's usual bandwidth."""
        calibration = calibrations().get(gpu, calibrations()["default"])
        bandwidth = self.catalogue.gpu(gpu).memory_bandwidth_bytes_per_s
        return OPTIMIZER_BYTES[self.precision] / (bandwidth * calibration.traffic_share)

    def _collectives(
        self, layer: Layer, gpu: str, tp: int, micro_batch: int
    ) -> tuple[float, float]:
        if tp == 1:
            return 0.0, 0.0
        place = Place(gpu, "", "")
        seconds = self.network.all_reduce_within(
            place,
            gpus=tp,
            total_bytes=FLOAT_BYTES[self.precision]
            * layer.allreduce_elements(micro_batch=micro_batch, sequence=self.sequence),
        )
        shares_a_bus = not self.network.machine_type(place).intra_link.full_duplex
        if shares_a_bus or gpu in self.network.measured.within:
            # Measured were tp / 2 pairs, all across the middle of the machine at once, and so
            # is what a bus carries in sum. A ring crosses the middle once each way, however
            # many GPUs it has.
            seconds *= 2 / tp
        return layer.allreduces_forward * seconds, layer.allreduces_backward * seconds


def peak_flops(gpu: Gpu, precision: str) -> float:
    """The peak of matrix products in a precision; fp32 runs as TF32 where there is one."""
    order = {
        "fp32": ("tf32", "fp32"),
        "bf16": ("bf16", "tf32", "fp32"),
        "fp16": ("fp16", "bf16", "fp32"),
    }[precision]
    return next(gpu.peak_flops[name] for name in order if name in gpu.peak_flops)
