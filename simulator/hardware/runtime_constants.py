"""Platform constants: what a runtime and a machine cost beyond the arithmetic, all in one place.

A constant stands here if it cannot be derived from a profile, a model or a network: the time of
a launch, a framework's own memory. Each says what it means and what it was fitted on. Nothing
here depends on a single case, a model or a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Messaging = Literal["buffered", "blocking", "lockstep"]
"""How stages exchange tensors.

``buffered``: a send never holds up its sender. ``blocking``: the sender waits until its message
is delivered. ``lockstep``: as DeepSpeed's pipeline engine issues its instructions, where a stage
sends an activation only after it has received the gradient of the same step, so that two
neighbours pay both transfers one after the other.
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """How a training runtime behaves, wherever it runs."""

    name: str
    messaging: Messaging
    sync: Literal["serial", "overlap", "job"]
    """When gradients are reduced: after a stage's last backward, layer by layer during it, or
    as the job says."""
    sync_bucket_bytes: float
    gradient_bytes_16bit: int
    """Bytes per gradient element on the wire in bf16 and fp16 jobs; fp32 jobs send four."""
    keeps_stage_outputs: bool
    """Whether the output of a stage stays alive until its backward."""
    flattens_gradients: bool
    """Whether gradients are copied into one flat buffer to be reduced."""


RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("sailor", "buffered", "job", 25e6, 4, False, False),
        # Bucket: the default of DeepSpeed's pipeline engine, 5e8 elements.
        Runtime("megatron-deepspeed", "lockstep", "serial", 2e9, 2, True, True),
    )
}


@dataclass(frozen=True, slots=True)
class Platform:
    """What one kind of machine adds under any runtime."""

    message_s: float
    """Device time lost per send or receive of a pipeline stage (launch, synchronisation)."""
    load_s: float
    """Device time per micro batch to load samples and build masks, on the first stage."""
    iteration_s: float
    """Per iteration: scheduler, loss bookkeeping, logging."""
    profiled_hook_s: float
    """Host time per layer and direction that profiling hooks add where launches are the limit."""
    ring_efficiency: float
    """Bandwidth of a ring all-reduce between machines over that of one-way transfers."""
    context_bytes: float
    """Memory used before the first tensor: driver, libraries, fused kernels, communicators."""
    fragmentation: float
    """Memory that the allocator cannot use, as a share of the activations."""
    residual: float
    """Mean relative error of iteration time on runs that the fit had not seen, where there were
    enough to leave some out; on those it had seen otherwise; a cautious guess without a fit.

    It adds to the error of the layer times that go into an estimate.
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
    """The constants of a GPU kind's usual machines."""
    return PLATFORMS.get(gpu, _DEFAULT)


def is_fitted(gpu: str) -> bool:
    """Whether anything was measured on this kind of machine."""
    return platform_of(gpu) not in (_DEFAULT, _CPU)
