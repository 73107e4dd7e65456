"""Computes layer times that were not measured, from FLOPs, memory traffic and kernel launches.

Forward and backward together take three times the forward's matrix products at a share of the
GPU's peak, plus three times its other memory traffic at a share of the bandwidth. Each direction
adds its tensor-parallel all-reduces, and takes at least the time to launch its kernels. The
shares are fitted per GPU kind on measured profiles; ``simulator/data/calibration.toml`` lists
them with their errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from simulator.arrays import Floats
from simulator.documents.files import built_in_table
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.types import Gpu
from simulator.layer_costs.weight_part import products_share
from simulator.models.layers import FLOAT_BYTES, CostSetup, Layer, Model, Precision
from simulator.network.network import Network
from simulator.spec.plan import Place
from simulator.spec.provenance import Provenance

OPTIMIZER_BYTES: Mapping[str, int] = {"fp32": 40, "bf16": 46, "fp16": 46}
"""Bytes per parameter that a step of Adam reads and writes: gradients are zeroed and summed for
their norm (8), a fused kernel reads and writes weight, moments and scaled gradient (32), and the
16-bit copy is derived (6)."""
MOMENT_BYTES = 8
"""Bytes of these that one moment takes: it is read and written. Adam has two, SGD has one."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds per layer for one micro batch, and per parameter for an optimizer step."""

    forward: Floats
    backward: Floats
    optimizer_s_per_parameter: float
    provenance: Provenance


END_KERNELS = 0.25
"""Kernels of an embedding or a head, relative to a block: at one sample an embedding took 0.2 to
0.4 ms and a block 1.2 to 2.3 ms (SOSP'25 artefact profiles of OPT-350M at TP 1)."""


TILE = 128
"""Rows and columns of a product that one multiprocessor computes at a time."""

SPLIT_KERNELS = 1.3
"""Host time of a launch-bound layer under tensor parallelism, relative to the whole layer: at one
sample a block of OPT-350M took 1.2 ms on one GH200, 1.5 ms on two or four (same profiles)."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """The demand of each layer on a GPU, in seconds at peak rates."""

    compute_s: Floats
    """Matrix products of one forward pass at the peak rate."""
    traffic_s: Floats
    """Other memory traffic of one forward pass at the peak bandwidth."""
    collectives_forward_s: Floats
    collectives_backward_s: Floats
    kernels: Floats
    """Number of kernels, relative to a block."""
    backward: Floats
    """FLOPs of backward relative to forward."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The shares of its peaks that a GPU kind reaches, with their error."""

    compute_share: float
    traffic_share: float
    collective_factor: float
    """Time of an all-reduce inside a machine, relative to what its links allow."""
    backward_ratio: float
    """Backward over forward without collectives where all weights are trained; their sum is
    three forward passes."""
    launch_s: float
    relative_error: float
    fitted_on: str

    def in_16_bit(self, half: HalfPrecision) -> Calibration:
        """Return the shares in bf16 or fp16; memory and launches are those of fp32."""
        return replace(
            self,
            compute_share=half.compute_share,
            traffic_share=half.traffic_share or self.traffic_share,
            backward_ratio=2.0,
            relative_error=half.relative_error,
            fitted_on=half.source,
        )

    def seconds(self, demand: Demand) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer."""
        both = 3 * (demand.compute_s / self.compute_share + demand.traffic_s / self.traffic_share)
        ahead = both / (1 + self.backward_ratio)
        forward = ahead + self.collective_factor * demand.collectives_forward_s
        less = (2 - demand.backward) * (demand.compute_s / self.compute_share)
        behind = np.maximum(both - ahead - less, 0)
        backward = behind + self.collective_factor * demand.collectives_backward_s
        floor = self.launch_s * demand.kernels
        return np.maximum(forward, floor), np.maximum(backward, floor)


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """The shares that a GPU kind reaches in bf16 and fp16, and where they come from."""

    compute_share: float
    relative_error: float
    source: str
    traffic_share: float | None = None
    """``None``: as in fp32."""


@cache
def half_precision() -> Mapping[str, HalfPrecision]:
    """Return the 16-bit shares by GPU kind; ``default`` is for kinds without measurements."""
    table = built_in_table("calibration.toml")["half"]
    return {name: HalfPrecision(**entry) for name, entry in table.items()}


@cache
def calibrations() -> Mapping[str, Calibration]:
    """Return the fitted shares by GPU kind; ``default`` is for kinds without measurements."""
    table = built_in_table("calibration.toml")["gpu"]
    return {name: Calibration(**entry) for name, entry in table.items()}


def launch_s(gpu: str) -> float:
    """Return the host's seconds for the kernels of a block, where a GPU kind was measured."""
    return calibrations().get(gpu, calibrations()["default"]).launch_s


def kernels_of(layers: Sequence[Layer]) -> Floats:
    """Return the kernels of each layer, relative to a block."""
    return np.array([1.0 if layer.kind == "block" else END_KERNELS for layer in layers])


@dataclass(frozen=True, slots=True, eq=False)
class Roofline:
    """Computes layer times of one model under one sequence length and precision."""

    model: Model
    sequence: int
    precision: Precision
    flash: bool
    catalogue: Catalogue
    network: Network
    moments: int = 2
    """Moments per parameter that the optimizer updates."""

    def under(self, *, sequence: int, precision: Precision) -> Roofline:
        """Return the roofline of the same model at another sequence length and precision."""
        return replace(self, sequence=sequence, precision=precision)

    def times(self, gpu: str, *, tp: int, micro_batch: int) -> LayerTimes:
        """Return the times on ``tp`` GPUs of a kind in one machine, for one micro batch."""
        calibration = self.calibration(gpu)
        note = f"{gpu}: computed, not measured (calibrated on {calibration.fitted_on})"
        demand = self.demand(gpu, tp=tp, micro_batch=micro_batch)
        forward, backward = calibration.seconds(demand)
        return LayerTimes(
            forward,
            backward,
            self.optimizer_s_per_parameter(gpu),
            Provenance(
                "analytic",
                calibration.relative_error,
                (note, *self._cautions(gpu, forward, calibration)),
            ),
        )

    def weight_shares(self, gpu: str, *, tp: int, micro_batch: int) -> Floats:
        """Return the share of each layer's backward that the gradient of its weights takes.

        These are the matrix products alone: all-reduces and other memory traffic are not divided.
        """
        demand = self.demand(gpu, tp=tp, micro_batch=micro_batch)
        calibration = self.calibration(gpu)
        products = [
            products_share(layer, micro_batch=micro_batch, sequence=self.sequence, tp=tp)
            for layer in self.model.layers
        ]
        _, backward = calibration.seconds(demand)
        shares = np.array(products) * demand.compute_s / calibration.compute_share / backward
        is_all = [layer.kind == "embedding" for layer in self.model.layers]
        found: Floats = np.where(is_all, 1.0, np.minimum(shares, 1.0))
        return found

    def calibration(self, gpu: str) -> Calibration:
        """Return the shares of a GPU kind for this job's precision and links."""
        found = calibrations().get(gpu, calibrations()["default"])
        if self.precision_on(gpu) != "fp32":
            found = found.in_16_bit(half_precision().get(gpu, half_precision()["default"]))
        if gpu not in self.network.measured.within:
            # The factor corrects measured curves of pairs; other links have rings of their own.
            found = replace(found, collective_factor=1.0)
        return found

    def precision_on(self, gpu: str) -> Precision:
        """Return the format in which a GPU kind computes."""
        return self.catalogue.gpu(gpu).computes_in(self.precision)

    def _cautions(self, gpu: str, forward: Floats, calibration: Calibration) -> Iterator[str]:
        """Yield notes on precision and launch-bound layers."""
        peaks = self.catalogue.gpu(gpu).peak_flops
        if self.precision not in peaks:
            yield f"{gpu} has no {self.precision} in hardware; it is computed as fp32"
        elif self.precision == "fp32" and "tf32" in peaks:
            yield f"{gpu}: matrix products in fp32 run as TF32 (workers allow it)"
        if np.median(forward) <= calibration.launch_s:
            yield (
                f"{gpu}: bound by kernel launches; a larger micro batch would take hardly longer"
            )

    def demand(self, gpu: str, *, tp: int, micro_batch: int) -> Demand:
        """Return the demand of every layer on one of ``tp`` GPUs of a kind."""
        facts, precision = self.catalogue.gpu(gpu), self.precision_on(gpu)
        layers = self.model.layers
        flops = [
            layer.forward_flops(micro_batch=micro_batch, sequence=self.sequence, tp=tp)
            for layer in layers
        ]
        setup = CostSetup(
            micro_batch=micro_batch,
            sequence=self.sequence,
            tp=tp,
            precision=precision,
            flash=self.flash,
        )
        traffic = [layer.memory_traffic_bytes(**setup) for layer in layers]
        collectives = [self._collectives(layer, gpu, tp, micro_batch) for layer in layers]
        return Demand(
            np.array(flops)
            / peak_flops(facts, precision)
            * self._waves(facts.multiprocessors, tp=tp, micro_batch=micro_batch),
            np.array(traffic) / facts.memory_bandwidth_bytes_per_s,
            np.array([forward for forward, _ in collectives]),
            np.array([backward for _, backward in collectives]),
            kernels_of(layers) * (SPLIT_KERNELS if tp > 1 else 1.0),
            np.array([layer.backward_over_forward() for layer in layers]),
        )

    def _waves(self, multiprocessors: int | None, *, tp: int, micro_batch: int) -> Floats:
        """Return how much longer each layer's products take because their last wave is not full.

        A product is computed in square tiles, one on each multiprocessor at a time. On average half
        a wave of them idles.
        """
        if multiprocessors is None:
            return np.ones(len(self.model.layers))
        tokens = -(-micro_batch * self.sequence // TILE)
        known: dict[int, float] = {}
        for layer in self.model.layers:
            if id(layer.tensors) not in known:
                shapes = [t.rank_shape(tp) for t in layer.tensors if len(t.shape) == 2]
                work = sum(rows * columns for rows, columns in shapes)
                idle = sum(
                    rows * columns * multiprocessors / (2 * tokens * -(-rows // TILE))
                    for rows, columns in shapes
                )
                known[id(layer.tensors)] = 1 + (idle / work if work else 0.0)
        return np.array([known[id(layer.tensors)] for layer in self.model.layers])

    def optimizer_s_per_parameter(self, gpu: str) -> float:
        """Return the optimizer's seconds per parameter, which memory bandwidth limits."""
        calibration = self.calibration(gpu)
        bandwidth = self.catalogue.gpu(gpu).memory_bandwidth_bytes_per_s
        moved = OPTIMIZER_BYTES[self.precision_on(gpu)] - MOMENT_BYTES * (2 - self.moments)
        return moved / (bandwidth * calibration.traffic_share)

    def _collectives(
        self, layer: Layer, gpu: str, tp: int, micro_batch: int
    ) -> tuple[float, float]:
        if tp == 1:
            return 0.0, 0.0
        place = Place(gpu, "", "")
        seconds = self.network.all_reduce_within(
            place,
            gpus=tp,
            total_bytes=FLOAT_BYTES[self.precision_on(gpu)]
            * layer.allreduce_elements(micro_batch=micro_batch, sequence=self.sequence),
        )
        if gpu in self.network.measured.within:
            # The measured curve is of tp / 2 pairs that all cross the middle of the machine, as
            # on a bus. A ring crosses the middle only once per direction.
            seconds *= 2 / tp
        return layer.allreduces_forward * seconds, layer.allreduces_backward * seconds


def peak_flops(gpu: Gpu, precision: str) -> float:
    """The peak of matrix products in a precision; fp32 runs as TF32 where there is one."""
    order = {
        "fp32": ("tf32", "fp32"),
        "bf16": ("bf16", "tf32", "fp32"),
        "fp16": ("fp16", "bf16", "fp32"),
    }[precision]
    rates = [gpu.peak_flops[name] for name in order if name in gpu.peak_flops]
    if not rates:
        what, cure = f"has no rate for jobs in {precision}", "add fp32, without tensor cores"
        raise InputError(Problem(f"[gpu.{gpu.name}] tflops", what, cure))
    return rates[0]
