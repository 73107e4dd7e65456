"""A step that only some ranks completed when one died is completed by all survivors or by none."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import torch

from tests.worker.threads import ThreadTransport, ThreadWorld, run_as_threads
from tests.worker.training_runs import BadImages, SomeLabels, image_job, plan_of, small_job, trained
from worker.distributed.interface import PeerLostError, TransportError
from worker.training.full_tensors import rank_tensors
from worker.training.trainer import RankTrainer

JOB = small_job(tied=True, clip_norm=1.0)
PLAN = plan_of(1, (3, [(0, 5, 1)]), (3, [(0, 5, 1)]), (2, [(0, 5, 1)]))
LAST = 2
"""The step in whose vote rank 1 dies."""
UNHEARD_S = 0.05


class Unheard:
    """The vote's group as rank 2 sees it: aborted just before its last result."""

    def __init__(self, trainer: RankTrainer, world: ThreadWorld, group) -> None:
        self._trainer, self._world, self._group = trainer, world, group
        self.size, self.index = group.size, group.index

    def read_sum(self, tensor):
        values = self._group.read_sum(tensor)
        if self._trainer.progress.step == LAST:
            while self._world.votes.get(0, (0,))[0] != LAST:
                pass  # Rank 0 has the result by now.
            time.sleep(UNHEARD_S)
            self._world.fail(PeerLostError(1, "voting"))
            raise PeerLostError(1, "voting")
        return values


def until_the_loss(job, *, zero: int = 0, data=None):
    """Return the completed steps, last report and state of each survivor."""
    job = replace(job, zero=zero)
    worlds = []

    def body(transport: ThreadTransport):
        world = transport._world
        worlds.append(world)
        trainer = RankTrainer(job, PLAN, transport.rank, transport, data or SomeLabels(job))
        if transport.rank == 2:
            trainer._vote._group = Unheard(trainer, world, trainer.world_group)
        try:
            for _ in range(10):
                trainer.step()
        except TransportError:
            report = trainer.roll_forward()
        return trainer.progress, report, rank_tensors(trainer.buffers.values())

    return run_as_threads(3, body)


def test_rank_that_missed_the_vote_rolls_forward_by_a_peers_result():
    (done, _, state), _, (rolled, report, same) = until_the_loss(JOB)
    assert report.step == LAST
    assert report.seconds > UNHEARD_S, "its rates would be those of the update alone"
    assert rolled == done, "the steps of who did not hear are not those of who did"
    assert rolled.step == LAST + 1
    plain = trained(JOB, PLAN, steps=LAST + 1)
    assert report.loss == plain.reports[-1].loss
    for key, parts in state.items():
        if key[2] != "gradient":
            assert torch.equal(parts[0][1], same[key][0][1]), key
            assert torch.equal(parts[0][1], plain.state[key]), key


def test_skipped_step_rolls_forward_too():
    job, data = image_job(), BadImages({LAST})
    (done, _, state), _, (rolled, report, same) = until_the_loss(job, data=data)
    assert report.skipped
    assert rolled == done
    assert (rolled.step, rolled.updates, rolled.nonfinite) == (LAST + 1, LAST, 1)
    for key, parts in state.items():
        assert key[2] == "gradient" or torch.equal(parts[0][1], same[key][0][1]), key


def test_rank_without_complete_gradients_does_not_roll_forward():
    all_done = threading.Barrier(3)

    def body(transport: ThreadTransport):
        trainer = RankTrainer(JOB, PLAN, transport.rank, transport, SomeLabels(JOB))
        trainer.step()
        all_done.wait()  # An abort before a peer has completed its step would abort that one, too.
        transport.record_vote((1, [0.0] * 35))  # A result of the next step, which is impossible.
        transport.abort("over")
        return trainer.roll_forward(), trainer.progress.step

    assert run_as_threads(3, body) == [(None, 1)] * 3


def test_zero1_does_not_roll_forward():
    _, _, (rolled, report, _) = until_the_loss(JOB, zero=1)
    assert (report, rolled.step) == (None, LAST)
