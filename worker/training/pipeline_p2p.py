"""Point-to-point transfers between neighbouring stages: activations forward, gradients back.

All ranks of a stage hold the same activations, so each rank of the next stage receives from one of
them, whatever the TP degrees of the two stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from worker.distributed.interface import Pending, Transport

_DIMS_MAX = 7
_AHEAD_MAX = 2
"""Tensors that are on their way to each receiver, where their number is limited."""
_POLL_S = 0.001


TellsShape = Literal["never", "once", "always"]
"""When a sender sends a tensor's shape before it."""


class Outbox:
    """Sends to some ranks without blocking."""

    def __init__(
        self, transport: Transport, targets: Sequence[int], *, tells_shape: TellsShape
    ) -> None:
        self._transport = transport
        self._targets = tuple(targets)
        self._tells_shape = tells_shape
        self._sending: list[Pending] = []

    def send(self, tensor: Tensor) -> None:
        """Start to send; the tensor must not be written until ``finish``."""
        tensor = tensor.contiguous()
        self._sending = [each for each in self._sending if not each.is_done()]
        for target in self._targets:
            if self._tells_shape != "never":
                self._sending.append(self._transport.send(_header(tensor), to=target))
            self._sending.append(self._transport.send(tensor, to=target))
        if self._tells_shape == "once":
            self._tells_shape = "never"

    def wait_for_room(self) -> None:
        """Wait on the host while as many tensors are on their way as may be."""
        most = (_AHEAD_MAX - 1) * len(self._targets) * (1 if self._tells_shape == "never" else 2)
        while len(self._sending) > most:
            oldest = self._sending.pop(0)
            oldest.wait()
            while not oldest.is_done():  # On a GPU, a wait blocks only the device.
                time.sleep(_POLL_S)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for each in self._sending:
            each.wait()
        self._sending.clear()


class Inbox:
    """Receives tensors from one rank.

    If ``shape`` is not set, the sender sends the shape before the first tensor; with ``forgets``,
    before every one.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        forgets: bool = False,
    ) -> None:
        self._forgets = forgets
        self._transport = transport
        self._source = source
        self._dtype = dtype
        self._device = device
        self.shape: tuple[int, ...] | None = None
        self._arriving: tuple[Tensor, Pending] | None = None

    def expect(self) -> None:
        """Start to receive the next tensor, if its shape is known."""
        if self.shape is not None:
            self._arriving = self._begin(self.shape)

    def take(self) -> Tensor:
        """Wait for the next tensor."""
        if self.shape is None:
            self.shape = self._receive_shape()
        tensor, pending = self._arriving or self._begin(self.shape)
        self._arriving = None
        if self._forgets:
            self.shape = None
        pending.wait()
        return tensor

    def _begin(self, shape: tuple[int, ...]) -> tuple[Tensor, Pending]:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor, self._transport.receive(tensor, source=self._source)

    def _receive_shape(self) -> tuple[int, ...]:
        header = torch.zeros(_DIMS_MAX + 1, dtype=torch.int64, device=self._device)
        self._transport.receive(header, source=self._source).wait()
        dims, *sizes = header.tolist()
        return tuple(sizes[:dims])


def _header(tensor: Tensor) -> Tensor:
    assert tensor.dim() <= _DIMS_MAX, "too many dimensions"
    sizes = [tensor.dim(), *tensor.shape, *[0] * (_DIMS_MAX - tensor.dim())]
    return torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
