"""Measures the layers of a short model: seconds of each pass, and bytes kept and transient.

Where the device works behind the host, the host's own time for each pass is measured apart: in a
short model the head, on which a device is busy for long, hides how long the others take to launch.
Times and bytes are measured in separate passes, since hooks that see what is kept take time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from worker.layer_profiles.device import Device, refusing_too_much
from worker.layer_profiles.sampling import SecondsRow, median_and_spread, sample
from worker.layer_profiles.short_model import ShortModel
from worker.models.random_numbers.microbatch_context import MicroBatch

WARM_UP = 2
"""Queues of rounds that do not count: kernels are chosen and loaded, caches and arenas filled."""
HOST_ROUNDS = 7
"""How often the host's own time is measured, where a device works behind it."""


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What was measured of the layers of a short model, in their order."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_spread: tuple[float, ...]
    backward_spread: tuple[float, ...]
    spread: float
    """Relative spread of a round's total seconds."""
    samples: int
    host_forward_s: tuple[float, ...]
    """What the host takes for each pass while the device works behind it; else 0."""
    host_backward_s: tuple[float, ...]
    kept_bytes: tuple[int, ...]
    """What a layer holds from its forward to its backward pass, its input included."""
    transient_bytes: tuple[int, ...]
    """What it takes beyond that, while one of its passes runs."""


def measure(
    short: ShortModel,
    micro_batch: int,
    device: Device,
    *,
    now: Callable[[], float],
    until_s: float,
    told: Callable[[int], None] = lambda _: None,
) -> LayerFigures:
    """Measure a micro batch; ``DoesNotFitError`` if the device has too little memory."""
    with refusing_too_much(device):
        x, current = short.micro_batch(micro_batch)

        def take() -> list[SecondsRow]:
            marks: list[Any] = []
            for _ in range(device.queued):
                short.round(x, current, lambda: marks.append(device.mark()))
            return rounds(device.seconds(marks), layers=len(short.layers))

        def host_row() -> SecondsRow:
            device.seconds([device.mark()])  # So that the host does not wait for a full queue.
            marks: list[float] = []
            short.round(x, current, lambda: marks.append(device.host_now()))
            return [end - begin for begin, end in pairwise(marks)]

        for _ in range(WARM_UP):
            take()
        kept, transient = _bytes(short, x, current, device)
        rows = sample(take, now=now, until_s=until_s, told=told)
        host = [host_row() for _ in range(HOST_ROUNDS)] if device.queued > 1 else []
    return figures(rows, kept, transient, host)


def rounds(seconds: Sequence[float], *, layers: int) -> list[SecondsRow]:
    """Split the seconds between the marks of queued rounds; those between rounds do not count.

    The first of several is left out: before it the device waited for the host.
    """
    passes = 2 * layers
    found = [seconds[at : at + passes] for at in range(0, len(seconds), passes + 1)]
    return list(found[1:] if len(found) > 1 else found)


def figures(
    rows: Sequence[SecondsRow],
    kept: Sequence[int],
    transient: Sequence[int],
    host: Sequence[SecondsRow] = (),
) -> LayerFigures:
    """Sum up the rounds: forward passes in order, backward passes in reverse.

    ``host`` has the seconds that the host took for each pass, where it does not wait for them.
    """
    count = len(kept)
    columns = [median_and_spread(column) for column in zip(*rows, strict=True)]
    launched = [statistics.median(column) for column in zip(*host, strict=True)]
    launched = launched or [0.0] * len(columns)
    ahead, behind = columns[:count], columns[count:][::-1]
    return LayerFigures(
        forward_s=tuple(median for median, _ in ahead),
        backward_s=tuple(median for median, _ in behind),
        forward_spread=tuple(spread for _, spread in ahead),
        backward_spread=tuple(spread for _, spread in behind),
        spread=median_and_spread([sum(row) for row in rows])[1],
        samples=len(rows),
        host_forward_s=tuple(launched[:count]),
        host_backward_s=tuple(launched[count:][::-1]),
        kept_bytes=tuple(kept),
        transient_bytes=tuple(transient),
    )


def measure_optimizer(
    short: ShortModel, device: Device, *, now: Callable[[], float], until_s: float
) -> tuple[float, int] | None:
    """Return the seconds of an optimizer step on one layer, and its number of weights."""
    with refusing_too_much(device):
        found = short.optimizer_round()
        if found is None:
            return None
        weights, run = found

        def take() -> list[SecondsRow]:
            marks = [device.mark()]
            for _ in range(device.queued):
                run()
                marks.append(device.mark())
            seconds = [[each] for each in device.seconds(marks)]
            return list(seconds[1:] if len(seconds) > 1 else seconds)

        for _ in range(WARM_UP):
            take()
        rows = sample(take, now=now, until_s=until_s)
    return median_and_spread([row[0] for row in rows])[0], weights


@dataclass(slots=True)
class _Pass:
    """A layer between its passes."""

    input: Tensor
    output: Tensor
    kept: int
    peak: int


def _bytes(
    short: ShortModel, x: Tensor, current: MicroBatch, device: Device
) -> tuple[list[int], list[int]]:
    """Return the kept and the transient bytes of each layer."""
    begun: list[_Pass] = []
    elsewhere = short.weight_storages()
    elsewhere |= {each.untyped_storage().data_ptr() for each in _shared_tensors(current)}
    for compute in short.layer_by_layer():
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        saved: dict[int, int] = {}
        with saved_tensors_hooks(partial(_note_storage, saved), _return_unchanged):
            output, peak = device.bytes_over(partial(compute, x, current))
        # The input of one layer is the output of another, and counted once.
        own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
        without = elsewhere | {output.untyped_storage().data_ptr()}
        own |= {place: size for place, size in saved.items() if place not in without}
        begun.append(_Pass(x, output, sum(own.values()), peak))
        x = output
    incoming: Tensor | None = short.loss_gradient(x)
    transient: list[int] = []
    kept = [each.kept for each in begun]
    for index in reversed(range(len(begun))):
        part, gradient = begun.pop(), incoming

        _, peak = device.bytes_over(partial(_backward, short, part, index, gradient))
        outer = _size(part.output) + (0 if gradient is None else _size(gradient))
        ahead = part.peak + _size(part.input) - part.kept
        transient.insert(0, max(ahead, outer + peak, 0))
        incoming = part.input.grad
    return kept, transient


def _backward(short: ShortModel, part: _Pass, index: int, gradient: Tensor | None) -> None:
    if part.output.requires_grad:
        torch.autograd.backward(part.output, gradient)
    short.collect_gradients(short.indices[index])


def _note_storage(saved: dict[int, int], tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    saved[storage.data_ptr()] = storage.nbytes()
    return tensor.detach()


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _shared_tensors(current: MicroBatch) -> list[Tensor]:
    """Return what all layers share and a stage holds once: labels, masks, positions."""
    arguments = current.block_arguments
    rest = [] if arguments is None else arguments.rest
    found = (current.samples, current.labels, current.inputs, rest)
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
