"""Splits that a class declares are tried by numbers: what ranks compute is what one computes."""

from __future__ import annotations

import pytest
import torch

from simulator.documents.problems import InputError
from worker.models.user_module import split_check
from worker.script.recipe import Recipe


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
    """Has parameters in the split part, of whose gradients each rank has a part."""

    def __init__(self):
        super().__init__()
        self.inside = torch.nn.PReLU()

    def forward(self, x):
        return x + self.down(self.scale * self.inside(self.up(self.norm(x))))


class Single(Wide):
    """Has a parameter without dimensions in the split part."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

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


@pytest.mark.parametrize("kind", [Wide, Scaled])
def test_splits_with_equal_results_are_accepted(kind):
    recipe = recipe_of(kind)
    assert recipe.job().max_tp == 8
    assert recipe.notes() == []


def test_gradients_of_parameters_between_split_parts_are_summed():
    splits = recipe_of(Scaled).splits
    partial = {name for name, kind in splits.kinds.items() if kind == "partial"}
    assert partial == {f"1.{n}.{name}" for n in range(3) for name in ("scale", "inside.weight")}


def test_a_single_number_between_split_parts_keeps_blocks_whole():
    (note,) = recipe_of(Single).notes()
    assert note.endswith("1.0.scale is a single number, used between split parts")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Normed, "model: 1.0: computes another result when 2 ranks share up, down; correct splits"),
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
