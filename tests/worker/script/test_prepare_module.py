"""What a script has switched off stays off, and what Sailor decides itself is switched off."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from torch import nn

from worker.models.user_module.cut_module import CutModule
from worker.script.prepare_module import switch_to_training
from worker.script.recipe import Recipe

pytestmark = pytest.mark.torch


class Pretrained(nn.Sequential):
    """Comes in evaluation, as models of transformers do."""

    @classmethod
    def from_pretrained(cls):
        return cls(nn.Linear(2, 2), nn.Dropout(0.1)).eval()


def in_training(module):
    return [name for name, part in module.named_modules() if part.training]


def test_parts_that_a_script_put_into_evaluation_stay_so():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    module[1].eval()
    module[1][0].train()
    switch_to_training(module)
    assert in_training(module) == ["", "0", "1.0"]


def test_a_whole_module_in_evaluation_trains():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    switch_to_training(module)
    assert in_training(module) == ["", "0", "1"]


def test_a_pretrained_part_stays_in_evaluation_only_if_it_is_frozen():
    trained = nn.Sequential(Pretrained.from_pretrained(), nn.Linear(2, 2))
    switch_to_training(trained)
    assert in_training(trained) == ["", "0", "0.0", "0.1", "1"]
    frozen = nn.Sequential(Pretrained.from_pretrained().requires_grad_(False), nn.Linear(2, 2))
    switch_to_training(frozen)
    assert in_training(frozen) == ["", "1"]


class KeepsFirst(nn.Sequential):
    """Keeps a part in evaluation by a method of its own."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("kind", [nn.Sequential, KeepsFirst])
def test_training_after_an_evaluation_is_as_before(kind):
    module = kind(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    module[1].eval()
    recipe = Recipe(module, [torch.ones(2)], 1, steps=1)
    cut = CutModule(recipe.skeleton(), recipe.cut, recipe.call)
    before = in_training(cut.module)
    assert before == (["", "0"] if kind is nn.Sequential else [""])
    cut.set_training(False)
    assert in_training(cut.module) == []
    cut.set_training(True)
    assert in_training(cut.module) == before
