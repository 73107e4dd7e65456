"""What a callback changes on one rank alone, and a loss or a data set uses on several, is named."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sailor
from simulator.documents.problems import InputError
from worker.script.outside_values import changed_variable, outside_values

STRENGTH = 1.0
TABLE = {"beta": 1.0, "other": 1.0}
OPTIONS = SimpleNamespace(beta=1.0, other=1.0, weights=torch.ones(2), steps=[0])


class Settings:
    """Settings as some scripts keep them."""

    beta = 1.0


class Loss(nn.Module):
    """A loss with a strength of its own."""

    def __init__(self):
        super().__init__()
        self.beta = self.other = 1.0

    def forward(self, output, _):
        return output * self.beta


class Rows:
    """A data set that gets harder."""

    def __init__(self):
        self.level, self.loaded = 0, 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index + self.level)), index % 3

    def loss(self, output, _):
        return output * self.level


LOSS, ROWS, RATE = Loss(), Rows(), [1.0]


def closed_over():
    rate = 1.0

    def change(*_):
        nonlocal rate
        rate += 1

    return (lambda output, _: output * rate), change


BY_CLOSURE, CHANGE_CLOSURE = closed_over()


def put(owner, name, value):
    return lambda: setattr(owner, name, value)


CASES = {
    "closure": (BY_CLOSURE, CHANGE_CLOSURE, "rate"),
    "global": (lambda o, _: o * STRENGTH, lambda: globals().update(STRENGTH=2.0), "STRENGTH"),
    "entry": (lambda o, _: o * TABLE["beta"], lambda: TABLE.update(beta=2.0), "TABLE['beta']"),
    "another entry": (lambda o, _: o * TABLE["beta"], lambda: TABLE.update(other=2.0), None),
    "attribute": (lambda o, _: o * OPTIONS.beta, put(OPTIONS, "beta", 2.0), "OPTIONS.beta"),
    "another attribute": (lambda o, _: o * OPTIONS.beta, put(OPTIONS, "other", 2.0), None),
    "tensor": (
        lambda o, _: o @ OPTIONS.weights,
        lambda: OPTIONS.weights.mul_(2),
        "OPTIONS.weights",
    ),
    "list": (lambda o, _: o * RATE[0], lambda: RATE.__setitem__(0, 2.0), "RATE[0]"),
    "class": (lambda o, _: o * Settings.beta, put(Settings, "beta", 2.0), "Settings.beta"),
    "object": (LOSS, put(LOSS, "beta", 2.0), "beta"),
    "object's other": (LOSS, put(LOSS, "other", 2.0), None),
    "method": (ROWS.loss, put(ROWS, "level", 2), "level"),
    "data set": (ROWS, put(ROWS, "level", 3), "level"),
    "data set's other": (ROWS, put(ROWS, "loaded", 3), None),
    "partial": (partial(lambda o, _, k: o * OPTIONS.beta * k, k=2), put(OPTIONS, "beta", 3.0),
                "OPTIONS.beta"),
    "no number": (lambda o, _: o * math.nan, lambda: None, None),
    "no code": ([1, 2], lambda: None, None),
}  # fmt: skip


@pytest.mark.parametrize(("used", "change", "name"), CASES.values(), ids=CASES)
def test_a_changed_variable_is_found_if_the_code_names_it(used, change, name):
    before = outside_values({"it": used})
    assert changed_variable(before, outside_values({"it": used})) is None
    change()
    found = changed_variable(before, outside_values({"it": used}))
    assert found == (None if name is None else (name, "it"))


def trainer(*, is_alone):
    weight = [1.0]

    def anneal(step, _):
        weight[0] = 0.5**step

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    given = {"batch_size": 4, "steps": 3, "callbacks": [anneal]}
    made = sailor.Trainer(
        *(model, Rows()),
        loss=lambda output, batch: weight[0] * cross_entropy(output, batch[1]),
        **given,
    )
    made.recipe = replace(made.recipe, is_alone=is_alone)
    return made


def test_a_loss_that_a_callback_changes_is_refused_where_several_ranks_compute_it():
    with pytest.raises(InputError, match=r"callbacks: change weight\[0\], which the loss uses"):
        trainer(is_alone=False).train()


def test_a_loss_that_a_callback_changes_is_noted_once_where_a_script_trains_alone(capsys):
    assert trainer(is_alone=True).recipe.is_alone
    trainer(is_alone=True).train()
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "note:" in line)
    assert note.startswith("note: callbacks change weight[0], which the loss uses: on a cluster")
