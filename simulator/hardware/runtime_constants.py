"""Constants of runtimes and platforms that no profile, model or network measurement gives.

Examples are the time of a kernel launch and the memory of the framework. Each constant says what
it means and what it was fitted on; none depends on a model or a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simulator.documents.files import built_in_table

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
    sends_whole: bool
    """Whether each rank of a stage receives whole tensors; else a share, and the ranks gather."""
    zero1_by_bucket: bool
    """Whether under ZeRO-1 each part of a layer has one owner, which gets the sum of its gradients,
    keeps its moments, updates it and broadcasts it to holders that keep fp32 copies; else all
    holders get all sums, and have equal shares of the rest."""


RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("sailor", "buffered", "job", 25e6, 4, False, False, True, True),
        # Bucket: the default of DeepSpeed's pipeline engine, 5e8 elements of 4 bytes.
        Runtime("megatron-deepspeed", "lockstep", "serial", 2e9, 2, True, True, False, False),
    )
}


TransportName = Literal["nccl", "gloo"]
"""The library that carries messages between ranks.

Gloo's rings run against the order of the ranks; it sends nothing before it has heard that the
receiver is ready, so each step of a ring takes a round trip.
"""


@dataclass(frozen=True, slots=True)
class Platform:
    """The overheads of one kind of machine under any runtime, as in ``data/platforms.toml``."""

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
    """Relative error of iteration time, added to that of passes and links so that nine of ten runs
    on record lie inside (docs/accuracy.md); a cautious guess without a record."""
    fitted_on: str
    """Empty without a fit."""
    transport: TransportName = "nccl"


PLATFORMS: Mapping[str, Platform] = {
    gpu: Platform(**{key: value for key, value in entry.items() if key != "gpus"})
    for entry in built_in_table("platforms.toml")["platform"].values()
    for gpu in entry["gpus"]
}


def platform_of(gpu: str) -> Platform:
    """Return the constants of the machines that a GPU kind usually comes in."""
    return PLATFORMS.get(gpu, PLATFORMS["default"])


def uses_gloo(gpu: str) -> bool:
    """Whether the ranks on this GPU kind talk by gloo, as those on CPUs do."""
    return platform_of(gpu).transport == "gloo"


def is_fitted(gpu: str) -> bool:
    """Whether the constants of this GPU kind were fitted to measurements."""
    return bool(platform_of(gpu).fitted_on)
