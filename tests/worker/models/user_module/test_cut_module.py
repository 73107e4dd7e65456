"""A cut module computes the same on one stage and on several, also in evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.worker.hf_families import VOCABULARY, sentences
from tests.worker.module_runs import STEPS, recipe_of
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import alone, plan_of
from worker.training.trainer import RankTrainer


class Encoder(nn.Module):
    """A model around torch's own encoder, which drops padding from evaluations by a fast path."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, attention_mask):
        padding = attention_mask == 0
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=padding))


def test_an_evaluation_of_torchs_encoder_hands_on_padding_between_stages():
    def make():
        torch.manual_seed(0)
        return Encoder()

    recipe = replace(recipe_of(make), eval_dataset=sentences(8))
    job = recipe.job()

    def evaluated(plan):
        def body(transport):
            rank = RankTrainer(job, plan, transport.rank, transport, recipe.data(), module=recipe)
            found = rank.evaluate(recipe.evaluation_after(STEPS - 1))
            rank.close()
            return found["loss"]

        return run_as_threads(plan.device_count, body)[0]

    two = plan_of(1, (8, [(0, 2, 1), (2, 4, 1)]))
    assert evaluated(two) == pytest.approx(evaluated(alone(job)), rel=1e-6)
