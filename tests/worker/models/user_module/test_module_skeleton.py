"""Copies of a module without values, also of modules that copy badly."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from simulator.documents.problems import InputError
from worker.models.user_module.module_skeleton import copied


class Attention(nn.Linear):
    """Keeps what it has computed, to be looked at."""

    def forward(self, x):
        self.scores = [super().forward(x).softmax(-1)]
        return self.scores[0] @ x


def test_a_module_is_copied_with_results_of_earlier_passes():
    module = nn.Sequential(Attention(2, 2))
    module(torch.ones(2, 2))
    found = copied(module, {})
    assert found[0].weight is not module[0].weight
    assert module[0].scores[0].requires_grad
    assert not found[0].scores[0].requires_grad
    assert torch.equal(found[0].scores[0], module[0].scores[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_before_each_pass_is_copied():
    module = nn.utils.weight_norm(nn.Linear(2, 2))
    found = copied(module, {})
    with torch.no_grad():
        found.weight_g.mul_(2)
    without_bias = module(torch.ones(1, 2)) - module.bias
    assert torch.allclose(found(torch.ones(1, 2)) - found.bias, 2 * without_bias)


def test_what_cannot_be_copied_is_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].guard = threading.Lock()
    with pytest.raises(InputError, match=r"cannot be copied, for 1.guard is a lock: .*; make"):
        copied(module, {})
