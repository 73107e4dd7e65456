"""Random flips of single bits in weights and moments are found, and the right rank is blamed."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random

import pytest
import torch

from simulator.spec.job import Checkpoint
from tests.worker.checkpoint.test_load_state import exact_job
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import SomeLabels, plan_of, small_job
from worker.checkpoint.load_state import flat_states
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, SnapshotTarget
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.trainer import RankTrainer

EVERY = 3
"""Steps between two comparisons."""
JOBS = {
    "adamw": small_job(tied=True),
    "sgd": small_job("llama", optimizer="sgd", learning_rate=0.05),
    "bf16": small_job("llama", precision="bf16"),
    "exact": exact_job(),
}


def three(last: int):
    """Return a plan under which at least three ranks hold each piece, in different layouts."""
    return plan_of(1, (3, [(0, last, 2)]), (3, [(0, 2, 1), (2, last, 1)]), (2, [(0, last, 1)]))


def two(last: int):
    """Return a plan under which two ranks hold each piece."""
    return plan_of(1, (4, [(0, 2, 1), (2, last, 1)]), (4, [(0, last, 1)]))


def states_of(trainer):
    return [flat for buffer in trainer.buffers.values() for flat in flat_states(buffer)]


def flips(memory, job, plan, count):
    """Flip one bit after the other; return for each one the rank that has it, and the outcome:
    the blamed ranks, or ``None`` if the next updates made the bits of all ranks equal again.
    """
    barrier, equal = threading.Barrier(plan.device_count), []
    job = replace(job, checkpoint=Checkpoint(compare_every=EVERY))

    def body(transport):
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        target = SnapshotTarget("j", 1, 1, "n", memory / str(transport.rank), 10**6, None, {})
        keeper = SnapshotManager.open(trainer, target, transport)
        trainer.snapshot_hook = keeper
        draw, found = Random("flips"), []
        trainer.step()
        for _ in range(count):
            keeper._compared, keeper._noted = trainer.progress.step, None
            clean = [flat.clone() for flat in states_of(trainer)]
            victim, before = draw.randrange(plan.device_count), draw.randrange(EVERY)
            where = [draw.random() for _ in range(3)]
            try:
                for number in range(EVERY + 1):
                    if number == before and victim == transport.rank:
                        flip(states_of(trainer), *where)
                    trainer.step()
                    keeper.after_step()
                blamed = None
                equal.append(bits(trainer))
            except ReplicaMismatchError as error:
                blamed = error.blamed
            barrier.wait()
            if blamed is None and transport.rank == 0:
                assert all_alike(equal), "a difference was not found"
            barrier.wait()
            equal.clear()
            found.append((victim, blamed))
            for flat, values in zip(states_of(trainer), clean, strict=True):
                flat.copy_(values)
            for buffer in trainer.buffers.values():
                if buffer.compute is not buffer.master:
                    trainer.precision.derive(buffer.master, into=buffer.compute)
        keeper.close()
        return found

    by_rank = run_as_threads(plan.device_count, body)
    assert all(each == by_rank[0] for each in by_rank), "all ranks say the same"
    return by_rank[0]


def flip(states, which, element, bit):
    flat = states[int(which * len(states))]
    wide = {4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = 8 * flat.element_size()
    one = 1 << int(bit * bits)
    flat.view(wide)[int(element * flat.numel())] ^= one - 2**bits * (one >= 2 ** (bits - 1))


def bits(trainer):
    """Return all bits of a rank by layer, atom and kind."""
    return {
        (layer, atom, kind): buffer.gather_atoms(flat, range(atom, atom + 1)).clone()
        for layer, buffer in trainer.buffers.items()
        for kind, flat in enumerate(flat_states(buffer))
        for atom in buffer.held
    } | {
        (layer, -1, kind): buffer.unsplit_part(flat).clone()
        for layer, buffer in trainer.buffers.items()
        for kind, flat in enumerate(flat_states(buffer))
    }


def all_alike(ranks):
    known = {}
    return all(
        torch.equal(known.setdefault(key, values), values)
        for each in ranks
        for key, values in each.items()
    )


@pytest.mark.sim
@pytest.mark.parametrize("name", JOBS)
def test_every_flip_is_found_and_its_rank_is_blamed(name, tmp_path, examples):
    """Unless an update has rounded it away: then there is nothing to find."""
    job = JOBS[name]
    found = flips(tmp_path, job, three(len(job.model.layers)), max(8, examples // 2))
    assert all(blamed in {(victim,), None} for victim, blamed in found)
    assert sum(blamed is None for _, blamed in found) <= len(found) // 5


@pytest.mark.sim
def test_every_flip_is_found_but_of_two_holders_none_is_blamed(tmp_path, examples):
    job = small_job(tied=False)
    found = flips(tmp_path, job, two(len(job.model.layers)), max(8, examples // 10))
    assert {blamed for _, blamed in found} <= {(), None}
    assert sum(blamed is None for _, blamed in found) <= len(found) // 5
