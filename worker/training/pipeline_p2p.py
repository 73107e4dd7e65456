"""What neighbouring stages of a pipeline send each other: activations one way, gradients back.

Every rank of a stage has the same activations, so each rank of the next stage takes them from one
of those before it, whatever the TP degrees of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.distributed.interface import Pending, Transport

_DIMS_MAX = 7


class Outbox:
    """Sends to some ranks, without making the sender wait."""

    def __init__(self, transport: Transport, targets: Sequence[int], *, tells_shape: bool) -> None:
        self._transport = transport
        self._targets = tuple(targets)
        self._tells_shape = tells_shape
        self._sending: list[Pending] = []

    def send(self, tensor: Tensor) -> None:
        """Start to send; the tensor may be read but not written until ``finish``."""
        tensor = tensor.contiguous()
        self._sending = [each for each in self._sending if not each.is_done()]
        for target in self._targets:
            if self._tells_shape:
                self._sending.append(self._transport.send(_header(tensor), to=target))
            self._sending.append(self._transport.send(tensor, to=target))
        self._tells_shape = False

    def finish(self) -> None:
        """Wait until all is sent."""
        for each in self._sending:
            each.wait()
        self._sending.clear()


class Inbox:
    """Receives tensors of one shape from one rank, one after the other.

    If nobody sets the shape, the first tensor is preceded by it.
    """

    def __init__(
        self, transport: Transport, source: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport = transport
        self._source = source
        self._dtype = dtype
        self._device = device
        self.shape: tuple[int, ...] | None = None
        self._arriving: tuple[Tensor, Pending] | None = None

    def expect(self) -> None:
        """Begin to receive the next tensor, if its shape is known already."""
        if self.shape is not None:
            self._arriving = self._begin(self.shape)

    def take(self) -> Tensor:
        """Wait for the next tensor."""
        if self.shape is None:
            self.shape = self._receive_shape()
        tensor, pending = self._arriving or self._begin(self.shape)
        self._arriving = None
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
    assert tensor.dim() <= _DIMS_MAX, "activations have few dimensions"
    sizes = [tensor.dim(), *tensor.shape, *[0] * (_DIMS_MAX - tensor.dim())]
    return torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
