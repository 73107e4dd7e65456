"""Holders of durable state are compared, and a difference is reported before it spreads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from simulator.spec.plan import Place, Plan
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels, plan_of, small_job
from worker.checkpoint.replica_check import ReplicaMismatchError
from worker.checkpoint.snapshot_manager import SnapshotManager, SnapshotTarget
from worker.training.trainer import RankTrainer

pytestmark = pytest.mark.torch

JOB = small_job(tied=True)
LAST = len(JOB.model.layers)


def plan_on(*kinds: str) -> Plan:
    """Return a plan with one replica on each GPU kind."""
    plan = plan_of(JOB.global_batch // len(kinds), *[(1, [(0, LAST, 1)]) for _ in kinds])
    pipelines = tuple(
        replace(line, stages=(replace(line.stages[0], places=(Place(kind, "m", "z", node=kind),)),))
        for line, kind in zip(plan.pipelines, kinds, strict=True)
    )
    return replace(plan, pipelines=pipelines)


def said(memory: Path, plan: Plan, *, flipped_at: int | None, stop_at: int = 99) -> list[str]:
    """Return each rank's error in 4 steps, every second one durable; one rank has a wrong bit."""

    def body(transport: ThreadTransport) -> str:
        rank = transport.rank
        trainer = RankTrainer(JOB, plan, rank, transport, SomeLabels(JOB))
        node = plan.pipelines[rank].stages[0].places[0].node or ""
        target = SnapshotTarget("j", 1, 1, node, memory / str(rank), 1, 2, {})
        keeper = SnapshotManager.open(trainer, target, transport)
        trainer.snapshot_hook = keeper
        keeper.replicated(99)
        try:
            for step in range(1, min(stop_at, 4) + 1):
                trainer.step()
                if (step, rank) == (flipped_at, 1):
                    trainer.buffers[1].master.view(torch.int32)[3] ^= 1 << 16
                keeper.after_step()
            keeper.seal_at_stop(persist=False)
        except ReplicaMismatchError as error:
            return str(error)
        finally:
            keeper.close()
        return ""

    return run_as_threads(len(plan.pipelines), body)


def test_equal_replicas_pass(tmp_path):
    assert said(tmp_path, plan_on("a", "a"), flipped_at=None) == ["", ""]


@pytest.mark.parametrize(("flipped_at", "seen_at"), [(1, 2), (2, 2)])
def test_wrong_bit_is_named_before_the_next_snapshot(tmp_path, flipped_at, seen_at):
    first, second = said(tmp_path, plan_on("a", "a"), flipped_at=flipped_at)
    assert f"of layer 1 sealed at step {seen_at} differs between" in first
    assert second == first.replace("rank 0", "rank 1")


def test_wrong_bit_is_named_at_a_stop(tmp_path):
    first, second = said(tmp_path, plan_on("a", "a"), flipped_at=2, stop_at=2)
    assert "sealed at step 2" in first
    assert "sealed at step 2" in second


def test_other_gpu_kinds_may_round_differently(tmp_path):
    assert said(tmp_path, plan_on("a", "b"), flipped_at=2) == ["", ""]
