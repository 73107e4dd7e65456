"""Every family under random plans: one step matches one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.random_plan import any_plan
from tests.worker.tiny_models import MODELS, job_of
from tests.worker.training_runs import alone, drawn, trained
from worker.data.sources.open_data import open_data
from worker.training.precision import FP64

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", MODELS)
def test_step_under_any_plan_matches_one_rank(name: str, tmp_path: Path, examples: int) -> None:
    job = job_of(name, max_tp=4, dropout=0.2)
    data = open_data(job, tmp_path)
    one = trained(job, alone(job), precision=FP64, data=data)
    assert one.reports[0].grad_norm > 0
    for seed in range(max(1, examples // 25)):
        plan = any_plan(drawn(f"{name} {seed}"), job, ranks_max=7)
        many = trained(job, plan, precision=FP64, data=data)
        assert many.disagreements == [], plan
        assert many.reports[0].loss == pytest.approx(one.reports[0].loss, rel=1e-12), plan
        assert many.state.keys() == one.state.keys(), plan
        for key, wanted in one.state.items():
            if key[2] == "gradient":
                torch.testing.assert_close(
                    many.state[key], wanted, rtol=1e-9, atol=1e-13, msg=f"{key} under {plan}"
                )
