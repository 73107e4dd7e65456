"""What a rank under DeepSpeed reports when its connections end."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from worker.distributed.interface import AbortedError
from worker.distributed.process_groups import ProcessTransport
from worker.engines.deepspeed.snapshot_adapter import DeepSpeedEngine
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.trainer import NotANumberError

pytestmark = pytest.mark.torch


class Aborted(ProcessTransport):
    """A transport that a peer has aborted."""

    def __init__(self):
        pass

    def wait_failed(self):
        return True

    def raise_cause(self, error, doing):
        raise AbortedError(f"{doing}: {error}")


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (RuntimeError("Connection closed"), AbortedError),
        (ReplicaMismatchError("differs", blamed=(1,)), ReplicaMismatchError),
        (NotANumberError(3, layer=1, rank=0), NotANumberError),
    ],
)
def test_reason_that_all_ranks_have_is_not_taken_for_a_lost_peer(error, reported):
    engine = object.__new__(DeepSpeedEngine)
    engine._transport = Aborted()

    def step():
        raise error

    with pytest.raises(reported):
        engine._guarded(step)
