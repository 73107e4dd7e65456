"""Constants of runtimes and platforms that no profile, model or network measurement gives.

Examples are the time of a kernel launch and the memory of the framework. Each constant says what
it means and what it was fitted on; none depends on a model or a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Messaging = Literal["buffered", "blocking", "lockstep"]
"""How stages exchange tensors.

``buffered``: a send never blocks the sender. ``blocking``: the sender waits for delivery.
``lockstep``: the order of DeepSpeed's pipeline engine, where a stage sends an activation only
after it has received the gradient of the same step, so that both transfers are serial.
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The behaviour of a training runtime on any platform."""

    name: str
    messaging: Messaging
    sync: Literal["serial", "overlap", "job"]
    """When gradients are reduced: ``serial`` after a stage's last backward, ``overlap`` layer by
    layer during it, ``job`` as the job sets it."""
    sync_bucket_bytes: float
    gradient_bytes_16bit: int
    """Bytes per gradient element on the wire in bf16 and fp16 jobs; fp32 jobs send four."""
    keeps_stage_outputs: bool
    """Whether a stage keeps its output until its backward."""
    flattens_gradients: bool
    """Whether gradients are copied into a flat buffer before the all-reduce."""


RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("sailor", "buffered", "job", 25e6, 4, False, False),
        # Bucket: the default of DeepSpeed's pipeline engine, 5e8 elements of 4 bytes.
        Runtime("megatron-deepspeed", "lockstep", "serial", 2e9, 2, True, True),
    )
}


@dataclass(frozen=True, slots=True)
class Platform:
    """The overheads of one kind of machine under any runtime."""

    message_s: float
    """Device time per send or receive of a pipeline stage (launch, synchronisation)."""
    load_s: float
    """Device time per micro batch on the first stage to load samples and build masks."""
    iteration_s: float
    """Time per iteration for scheduler, loss bookkeeping and logging."""
    profiled_hook_s: float
    """Host time per layer and direction that profiling hooks add to launch-bound layers."""
    ring_efficiency: float
    """Bandwidth of a ring all-reduce between machines, relative to one-way transfers."""
    context_bytes: float
    """Memory in use before the first tensor: driver, libraries, kernels, communicators."""
    fragmentation: float
    """Memory that the allocator wastes, as a share of the activations."""
    residual: float
    """Relative error of iteration time, added to the error of the layer times.

    The mean on held-out runs, or on the fitted runs where there were too few to hold some out;
    a cautious guess without a fit.
    """
    fitted_on: str


_GH200 = Platform(
    message_s=1.5e-3,
    load_s=4e-3,
    iteration_s=10e-3,
    profiled_hook_s=0.3e-3,
    ring_efficiency=0.5,
    context_bytes=4.3e9,
    fragmentation=0.0,
    residual=0.055,
    fitted_on="8 runs of OPT-350M on 1-32 nodes of 4 GH200, Megatron-DeepSpeed, fp32 (SOSP'25 "
    "artefact, cluster Clariden), all constants at once on iteration time and peak memory",
)
_RTX = Platform(
    message_s=0.0,
    load_s=20e-3,
    iteration_s=0.0,
    profiled_hook_s=0.0,
    ring_efficiency=1.0,
    context_bytes=0.5e9,
    fragmentation=0.0,
    residual=0.02,
    fitted_on="8 runs of OPT-350M on 2-6 nodes of RTX 3090, RTX 2080 and Titan RTX, "
    "Megatron-DeepSpeed, fp32 (SOSP'25 artefact, cluster MIT)",
)
_DEFAULT = Platform(
    message_s=0.2e-3,
    load_s=2e-3,
    iteration_s=10e-3,
    profiled_hook_s=0.0,
    ring_efficiency=0.8,
    context_bytes=1.5e9,
    fragmentation=0.03,
    residual=0.15,
    fitted_on="nothing: a cautious middle between the fitted platforms",
)
_CPU = Platform(
    message_s=0.2e-3,
    load_s=0.2e-3,
    iteration_s=2e-3,
    profiled_hook_s=0.0,
    ring_efficiency=0.8,
    context_bytes=0.35e9,
    fragmentation=0.03,
    residual=0.15,
    fitted_on="nothing: a guess for emulated devices on a CPU",
)

PLATFORMS: Mapping[str, Platform] = {
    "GH-96": _GH200,
    "RTX-2080": _RTX,
    "RTX-3090": _RTX,
    "Titan-RTX": _RTX,
    "cpu": _CPU,
}


def platform_of(gpu: str) -> Platform:
    """Return the constants of the machines that a GPU kind usually comes in."""
    return PLATFORMS.get(gpu, _DEFAULT)


def is_fitted(gpu: str) -> bool:
    """Whether the constants of this GPU kind were fitted to measurements."""
    return platform_of(gpu) not in (_DEFAULT, _CPU)
