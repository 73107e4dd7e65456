"""Shapes of boundary tensors are sent once, and refused if a death may have cut them short."""

from __future__ import annotations

import pytest
import torch

from simulator.documents.problems import InputError
from tests.worker.threads import ThreadWorld
from worker.distributed.interface import PeerLostError
from worker.training.pipeline_p2p import TensorReceiver, TensorSender


class Counted:
    """A transport that counts what is sent."""

    def __init__(self, transport):
        self._transport = transport
        self.sent = []

    def send(self, tensor, *, to):
        self.sent.append(tuple(tensor.shape))
        return self._transport.send(tensor, to=to)


def test_shape_is_sent_once_for_each_signature():
    world = ThreadWorld(2)
    sender = Counted(world.transport(0))
    outbox = TensorSender(sender, [1])
    inbox = TensorReceiver(world.transport(1), 0, dtype=torch.float32, device=torch.device("cpu"))
    for length in (3, 5, 3, 3, 5):
        outbox.send(torch.full((2, length), float(length)), signature=length)
    assert len(sender.sent) == 5 + 2
    for length in (3, 5, 3, 3, 5):
        inbox.expect(length)
        assert torch.equal(inbox.take(length), torch.full((2, length), float(length)))


def test_another_shape_for_the_same_signature_is_refused():
    outbox = TensorSender(ThreadWorld(2).transport(0), [1])
    outbox.send(torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"hands 2 x 4 numbers .* and 2 x 3 before"):
        outbox.send(torch.zeros(2, 4))


class CutShort:
    """A transport on a GPU whose peer is lost: a transfer ends, and leaves what was there."""

    def receive(self, tensor, *, source):  # noqa: ARG002 - part of the interface
        tensor.fill_(2**40)
        return self

    def wait(self):
        return

    def check(self):
        raise PeerLostError(0, "forward")


def test_shape_that_a_death_cut_short_is_not_believed():
    inbox = TensorReceiver(CutShort(), 0, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(PeerLostError):
        inbox.take()
