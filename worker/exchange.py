"""What neighbouring stages of a pipeline send each other: activations one way, gradients back.

Every rank of a stage has the same activations, so each rank of the next stage takes them from one
of those before it, whatever the TP degrees of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.transport.base import Pending, Transport

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


class Arriving:
    """A tensor on its way."""

    def __init__(self, tensor: Tensor, pending: Pending) -> None:
        self._tensor = tensor
        self._pending = pending

    def wait(self) -> Tensor:
        """Return it when it is there."""
        self._pending.wait()
        return self._tensor


class Inbox:
    """Receives tensors of one shape from one rank; the first is preceded by its shape."""

    def __init__(
        self, transport: Transport, source: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport = transport
        self._source = source
        self._dtype = dtype
        self._device = device
        self.shape: tuple[int, ...] | None = None

    def expect(self) -> Arriving:
        """Begin to receive the next tensor."""
        if self.shape is None:
            header = torch.zeros(_DIMS_MAX + 1, dtype=torch.int64, device=self._device)
            self._transport.receive(header, source=self._source).wait()
            dims, *sizes = header.tolist()
            self.shape = tuple(sizes[:dims])
        tensor = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        return Arriving(tensor, self._transport.receive(tensor, source=self._source))


def _header(tensor: Tensor) -> Tensor:
    assert tensor.dim() <= _DIMS_MAX, "activations have few dimensions"
    sizes = [tensor.dim(), *tensor.shape, *[0] * (_DIMS_MAX - tensor.dim())]
    return torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
