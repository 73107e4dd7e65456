"""What a script gives is tried before it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sailor
from simulator.documents.problems import InputError


@pytest.mark.parametrize("metrics", [{}, {"error": lambda output, _: (output.sum(), 1)}])
def test_samples_of_an_evaluation_that_cannot_be_stacked_are_refused_before_training(metrics):
    """Else the run would end at its first evaluation, after hours."""
    rows = [(torch.zeros(2, 8), 0), (torch.zeros(3, 8), 1)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    given = {"loss": lambda output, _: output.square().sum(), "metrics": metrics}
    trainer = sailor.Trainer(
        model, rows[:1] * 4, batch_size=2, steps=3, eval_dataset=rows, eval_every=1000, **given
    )
    with pytest.raises(InputError, match=r"eval_dataset: .* cannot be stacked.*sailor\.pad"):
        trainer.recipe.job()
