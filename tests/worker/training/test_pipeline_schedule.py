"""A rank that knows of a loss computes nothing more, of a step or of an evaluation.

Without stages it would hear nothing of other ranks until all micro batches are done, and what it
has is not sealed before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker.training_runs import SomeLabels, plan_of, small_job
from worker.distributed.interface import AbortedError
from worker.distributed.single_rank import SingleRankTransport
from worker.training.trainer import RankTrainer

JOB = small_job()
PLAN = plan_of(1, (8, [(0, len(JOB.model.layers), 1)]))
ONE = torch.ones(())


class ThreeBatches(SomeLabels):
    """Data to evaluate."""

    def batches(self) -> int:
        return 3

    def positions_in(self, _: int, positions: range) -> list[int]:
        return list(positions)


@pytest.mark.parametrize("what", ["forward", "evaluate"])
def test_a_loss_ends_the_passes_of_a_rank(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    transport = SingleRankTransport()
    rank = RankTrainer(JOB, PLAN, 0, transport, SomeLabels(JOB))
    runner, computed = rank._pipeline._runners[0], []
    compute = runner.forward

    def counted(*about: Any, current: Any) -> Any:
        computed.append(int(current.samples))
        if len(computed) == 2:
            transport.abort("rank 1 is lost")
        return compute(*about, current=current) if what == "forward" else {"loss": (ONE, 1)}

    monkeypatch.setattr(runner, what, counted)
    with pytest.raises(AbortedError, match="rank 1 is lost"):
        rank.step() if what == "forward" else rank._pipeline.evaluate(ThreeBatches(JOB))
    rank.close()
    assert computed == [0, 1]
