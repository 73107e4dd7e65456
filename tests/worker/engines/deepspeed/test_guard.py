"""What a rank under DeepSpeed reports when its connections end."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.worker.training_runs import plan_of, small_job
from worker.distributed.interface import AbortedError
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.single_rank import SingleRankTransport
from worker.engines.deepspeed.engine import DeepSpeedTrainer
from worker.engines.deepspeed.snapshot_adapter import DeepSpeedEngine
from worker.profiling.timeline import Recorder
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.trainer import NotANumberError, TrainingProgress


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
        engine._call_guarded(step)


@pytest.mark.parametrize("loss", [7.25, float("nan")])
def test_loss_that_an_abort_cut_short_is_not_believed(loss):
    """On a GPU the sums of an aborted step end like completed ones, with any result."""
    transport, before = SingleRankTransport(), TrainingProgress()

    def train_batch(_):
        transport.abort("a peer is lost")
        return torch.tensor(loss)

    trainer = object.__new__(DeepSpeedTrainer)
    trainer.job, trainer.plan = small_job(), plan_of(8, (1, [(0, 5, 1)]))
    trainer.progress, trainer._check, trainer._follows_job = before, transport.check, False
    trainer._bad, trainer._at_peak_s = torch.zeros(5, dtype=torch.bool), 0.0
    trainer._read = lambda: ([(torch.zeros(1), torch.zeros(1))], 0, 8, 0)
    trainer._engine = SimpleNamespace(
        train_batch=train_batch,
        get_global_grad_norm=lambda: 1.0,
        get_lr=lambda: [0.1],
        optimizer=SimpleNamespace(),
    )
    engine = object.__new__(DeepSpeedEngine)
    engine._transport, engine._trainer, engine.recorder = transport, trainer, Recorder()
    engine._compared, engine.world_group = True, None
    with pytest.raises(AbortedError):
        engine.step()
    assert not engine.update_complete
    assert trainer.progress is before


def test_state_that_an_abort_cut_short_is_not_exported():
    transport = SingleRankTransport()
    engine = object.__new__(DeepSpeedEngine)
    engine._transport, engine.buffers = transport, {}
    gather = partial(transport.abort, "a peer is lost")
    engine._trainer = SimpleNamespace(rank_tensors=lambda: gather() or {})
    with pytest.raises(AbortedError):
        engine.export_state()
