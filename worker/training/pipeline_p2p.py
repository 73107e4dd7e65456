"""Point-to-point transfers between neighbouring stages: activations forward, gradients back.

All ranks of a stage hold the same activations, so each rank of the next stage receives from one of
them, whatever the TP degrees of the two stages. Under sequence parallelism each holds its own
tokens. Between stages of one TP degree, a rank sends them to the one with the same tokens; else it
gathers all of them first, and the receiver takes its own.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from worker.distributed.interface import Collective, PendingOperation, Transport
from worker.distributed.token_shares import gather_tokens, own_tokens

_DIMS_MAX = 7
_AHEAD_MAX = 2
"""The most tensors on their way to each receiver, where their number is limited."""
_POLL_S = 0.001

Shapes = dict[Hashable, tuple[int, ...]]
"""The shape of a boundary tensor, by the signature of its micro batch: what it depends on."""


class TensorSender:
    """Sends to some ranks without blocking."""

    def __init__(
        self,
        transport: Transport,
        targets: Sequence[int],
        *,
        tells_shapes: bool = True,
        sharing: Collective | None = None,
    ) -> None:
        """``tells_shapes``: send the shape before the first tensor of each signature.

        ``sharing``: the ranks that share the tokens of what is sent whole.
        """
        self._transport = transport
        self._targets = tuple(targets)
        self._tells_shapes = tells_shapes
        self._sharing = sharing
        self.shapes: Shapes = {}
        """What was sent."""
        self._sending: list[PendingOperation] = []

    def send(self, tensor: Tensor, signature: Hashable = ()) -> None:
        """Start to send; the tensor must not be written until ``finish``."""
        if self._sharing is not None:
            tensor = gather_tokens(tensor, self._sharing)
        tensor = tensor.contiguous()
        self._sending = [each for each in self._sending if not each.is_done()]
        shape = tuple(tensor.shape)
        is_new = signature not in self.shapes
        if self.shapes.setdefault(signature, shape) != shape:
            before = _sizes(self.shapes[signature])
            what = f"hands {_sizes(shape)} numbers from one layer to the next, and {before} before"
            cure = "let shapes between layers depend on the shapes of the batch alone"
            raise InputError(Problem("model", f"{what}, for batches of one shape", cure))
        for target in self._targets:
            if is_new and self._tells_shapes:
                self._sending.append(self._transport.send(_header(tensor), to=target))
            self._sending.append(self._transport.send(tensor, to=target))

    def wait_for_room(self) -> None:
        """Wait on the host while as many tensors are on their way as may be."""
        most = (_AHEAD_MAX - 1) * len(self._targets)
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


class TensorReceiver:
    """Receives tensors from one rank.

    A shape that ``shapes`` lacks is received first: the sender sends it before the first tensor of
    a signature.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Shapes | None = None,
        sharing: Collective | None = None,
    ) -> None:
        """``sharing``: the ranks that share the tokens of what arrives whole."""
        self._transport = transport
        self._source = source
        self._dtype = dtype
        self._device = device
        self._shapes: Shapes = {} if shapes is None else shapes
        self._sharing = sharing
        self._arriving: tuple[Tensor, PendingOperation] | None = None

    def expect(self, signature: Hashable = ()) -> None:
        """Start to receive the next tensor, if its shape is known."""
        shape = self._shapes.get(signature)
        if shape is not None:
            self._arriving = self._begin(shape)

    def take(self, signature: Hashable = ()) -> Tensor:
        """Wait for the next tensor."""
        if self._arriving is None:
            if signature not in self._shapes:
                self._shapes[signature] = self._receive_shape()
            self._arriving = self._begin(self._shapes[signature])
        tensor, pending = self._arriving
        self._arriving = None
        pending.wait()
        return tensor if self._sharing is None else own_tokens(tensor, self._sharing)

    def _begin(self, shape: tuple[int, ...]) -> tuple[Tensor, PendingOperation]:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor, self._transport.receive(tensor, source=self._source)

    def _receive_shape(self) -> tuple[int, ...]:
        header = torch.zeros(_DIMS_MAX + 1, dtype=torch.int64, device=self._device)
        self._transport.receive(header, source=self._source).wait()
        dims, *sizes = header.tolist()
        self._transport.check()  # On a GPU, an aborted transfer ends like a completed one.
        return tuple(sizes[:dims])


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _header(tensor: Tensor) -> Tensor:
    assert tensor.dim() <= _DIMS_MAX, "too many dimensions"
    sizes = [tensor.dim(), *tensor.shape, *[0] * (_DIMS_MAX - tensor.dim())]
    return torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
