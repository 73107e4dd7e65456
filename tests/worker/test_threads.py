"""The transport by threads: order of sums and messages, and failures that reach all ranks."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.worker.threads import ThreadWorld, run_as_threads
from worker.distributed.interface import AbortedError, DeadlineError, PeerLostError


def test_sums_are_bit_equal_on_all_ranks_and_in_every_run():
    def body(transport):
        own = torch.tensor([1e16, 1.0, -1e16, 3.0][transport.rank :][:1], dtype=torch.float64)
        return transport.group((0, 1, 2, 3)).all_reduce(own).item()

    assert run_as_threads(4, body) == [((1e16 + 1.0) - 1e16) + 3.0] * 4
    assert run_as_threads(4, body) == run_as_threads(4, body)


def test_overlapping_groups_do_not_mix():
    def body(transport):
        first = transport.group((0, 1)) if transport.rank < 2 else None
        last = transport.group((1, 2)) if transport.rank > 0 else None
        pending, tensors = [], []
        for group in (first, last):
            if group is not None:
                tensors.append(torch.full((3,), float(transport.rank + 1)))
                pending.append(group.start_all_reduce(tensors[-1]))
        for each in pending:
            each.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_as_threads(3, body) == [[3.0], [3.0, 5.0], [5.0]]


def test_max_reduction_and_broadcast():
    def body(transport):
        group = transport.group((0, 1, 2))
        largest = group.all_reduce(torch.tensor([float(transport.rank)]), "max").item()
        told = torch.tensor([10.0 * transport.rank])
        group.start_broadcast(told, source=1).wait()
        return largest, told.item()

    assert run_as_threads(3, body) == [(2.0, 10.0)] * 3


def test_messages_arrive_in_order_whichever_rank_is_first():
    def body(transport):
        if transport.rank == 0:
            for number in range(10):
                tensor = torch.tensor([float(number)])
                transport.send(tensor, to=1).wait()
                tensor.fill_(-1)  # The message keeps the values from when it was sent.
            return []
        targets = [torch.zeros(1) for _ in range(10)]
        waits = [transport.receive(target, source=0) for target in targets]
        for wait in waits:
            wait.wait()
        return [target.item() for target in targets]

    assert run_as_threads(2, body)[1] == [float(number) for number in range(10)]


def test_first_failure_ends_all_waits_and_is_raised():
    def body(transport):
        if transport.rank == 2:
            raise ValueError("bad sample")
        transport.group((0, 1)).all_reduce(torch.zeros(1))
        transport.receive(torch.zeros(1), source=2).wait()

    with pytest.raises(ValueError, match="bad sample"):
        run_as_threads(3, body)


def test_abort_from_another_thread_ends_a_wait():
    world = ThreadWorld(2)
    transport = world.transport(0)
    pending = transport.group((0, 1)).start_all_reduce(torch.zeros(1))
    threading.Timer(0.05, transport.abort, ("enough",)).start()
    with pytest.raises(AbortedError, match="rank 0: enough"):
        pending.wait()
    with pytest.raises(AbortedError):
        world.transport(1).send(torch.zeros(1), to=0)


def test_lost_rank_is_named():
    world = ThreadWorld(2)
    pending = world.transport(0).receive(torch.zeros(1), source=1)
    world.fail(PeerLostError(1, "a test"))
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        pending.wait()


def test_every_wait_has_a_deadline():
    world = ThreadWorld(2, deadline_s=0.05)
    with pytest.raises(DeadlineError, match=r"receiving from rank 1 did not finish within 0\.05 s"):
        world.transport(0).receive(torch.zeros(1), source=1).wait()
    with pytest.raises(DeadlineError):
        world.transport(0).group((0, 1)).all_reduce(torch.zeros(1))
