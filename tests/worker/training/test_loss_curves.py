"""Losses after many reconfigurations stay close to those of an uninterrupted run."""

from __future__ import annotations

import pytest

from tests.worker.checkpoint.snapshot_runs import on_nodes, train
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import alone, drawn, small_job, trained
from worker.data.sources.open_data import open_data

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative difference of each fp32 loss, as stated in docs/training.md."""
PLANS, STEPS = 12, 3
JOB = small_job(
    "llama", learning_rate=0.01, clip_norm=0.5, dropout=0.1, schedule="cosine", steps=PLANS * STEPS
)


def test_llama_under_twelve_plans_follows_the_uninterrupted_loss_curve(tmp_path):
    """Each plan restores the files that the previous one sealed."""
    data, draw = open_data(JOB, tmp_path), drawn("curve")
    after, losses, hashes = None, [], []
    for number in range(1, 1 + PLANS):
        plan = on_nodes(any_plan(draw, JOB, ranks_max=6), draw)
        after = train(JOB, plan, tmp_path, number=number, steps=STEPS, after=after, data=data)
        losses += [report.loss for report in after.reports]
        hashes += [report.sample_hash for report in after.reports]
    plain = trained(JOB, alone(JOB), steps=PLANS * STEPS, compare=False, data=data)
    assert losses == pytest.approx([report.loss for report in plain.reports], rel=TOLERANCE)
    assert hashes == [report.sample_hash for report in plain.reports]
    assert losses[-1] < 0.9 * losses[0], "nothing was learned, so that little could differ"
