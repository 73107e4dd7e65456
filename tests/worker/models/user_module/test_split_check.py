"""Splits that a class declares are tried by numbers: what ranks compute is what one computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from simulator.documents.problems import InputError
from worker.models.user_module import split_check
from worker.script.recipe import Recipe

pytestmark = pytest.mark.torch


class Wide(torch.nn.Module):
    splits = {"up": "columns", "down": "rows"}  # noqa: RUF012 - as a user would write it

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def inner(self, x):
        return x.relu()

    def forward(self, x):
        return x + self.scale * self.down(self.inner(self.up(self.norm(x))))


class Normed(Wide):
    """Reads all columns in the split part."""

    def inner(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class Scaled(Wide):
    """Has a parameter in the split part, of whose gradient each rank has a part."""

    def forward(self, x):
        return x + self.down(self.scale * self.up(self.norm(x)))


class Fused(Wide):
    """Has two halves in one tensor; a rank's columns are of one half only."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 48)

    def inner(self, x):
        gate, up = x.chunk(2, -1)
        return gate.sigmoid() * up


def recipe_of(kind, **options):
    torch.manual_seed(1)
    embedding, head = torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)
    blocks = torch.nn.Sequential(*(kind() for _ in range(3)))
    data = [(torch.arange(5) + i % 3, torch.arange(5)) for i in range(8)]
    module = torch.nn.Sequential(embedding, blocks, head)
    return Recipe(model=module, dataset=data, batch_size=4, steps=1, **options)


def test_splits_that_compute_the_same_pass():
    recipe = recipe_of(Wide)
    assert recipe.job().max_tp == 8
    assert recipe.notes() == []


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Normed, "model: 1.0: computes another result when 2 ranks share up, down; correct splits"),
        (Scaled, "computes another gradient of scale when 2 ranks share up, down"),
        (Fused, "computes another result when 2 ranks share up, down"),
    ],
)
def test_splits_that_fit_by_shape_and_compute_something_else_are_refused(kind, told):
    recipe = recipe_of(kind)
    assert recipe.splits.max_tp == 8, "the shapes fit"
    with pytest.raises(InputError, match=told):
        recipe.job()
    assert recipe_of(kind, max_tp=1).job().max_tp == 1


def test_initial_weights_of_zero_hide_nothing():
    class Zero(Normed):
        def __init__(self):
            super().__init__()
            torch.nn.init.zeros_(self.down.weight)

    with pytest.raises(InputError, match="computes another result"):
        recipe_of(Zero).job()


def test_blocks_too_large_to_try_are_noted(monkeypatch):
    monkeypatch.setattr(split_check, "_PRODUCTS_MAX", 1000)
    recipe = recipe_of(Normed)
    assert recipe.job().max_tp == 8
    (note,) = recipe.notes()
    assert note.startswith("the splits of 1.0 could not be tried by numbers")
