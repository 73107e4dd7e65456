"""Losses and metrics that use the script's model are refused: ranks train copies of it."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sailor
from simulator.documents.problems import InputError

DATA = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(8)]


class Net(nn.Module):
    """A model that leaves its head to the loss, if it has one."""

    def __init__(self, *, heads=1):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.seen = [self.blocks[0].weight] if heads > 1 else []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for weight in self.seen:
            x = x @ weight
        return self.head(x)


def trainer(model, **changes):
    given = {"batch_size": 4, "steps": 2, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return sailor.Trainer(model, DATA, **{**given, **changes})


def penalty(model):
    return sum(p.pow(2).sum() for p in model.parameters())


LOSSES = {
    "a penalty": lambda model: lambda out, b: cross_entropy(out, b[1]) + 0.1 * penalty(model),
    "a head": lambda model: lambda out, b: cross_entropy(model.head(torch.ones(len(out), 4)), b[1]),
    "a scale": lambda model: lambda out, b: cross_entropy(out * model.head.bias[0].item(), b[1]),
    "no gradient": lambda model: (
        lambda out, b: cross_entropy(out, b[1]) * model.head.weight.detach().norm()
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_uses_the_scripts_model_is_refused(loss):
    model = Net()
    with pytest.raises(InputError, match=r"loss: uses .* of the script's model, which keeps"):
        trainer(model, loss=loss(model)).train()


def test_a_loss_may_use_what_is_not_trained():
    model = Net()
    model.head.requires_grad_(requires_grad=False)
    weights = nn.Parameter(torch.ones(3))  # Of the loss alone.

    def loss(output, batch):
        kind = next(model.parameters()).dtype
        scale = torch.zeros_like(model.blocks[0].weight).sum() + model.head.weight.norm()
        return cross_entropy(output.to(kind) * scale * weights, batch[1])

    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    trainer(model, loss=loss, optimizer=optimizer).train()


def test_a_metric_that_uses_the_scripts_model_is_refused_before_training():
    model = Net()
    metrics = {"size": lambda output, _: output.sum() + model.head.weight.norm()}
    with pytest.raises(InputError, match=r"metric size: uses head.weight of the script's model"):
        trainer(model, eval_dataset=DATA, metrics=metrics).recipe.job()


def test_a_model_that_keeps_a_parameter_outside_of_its_parts_is_refused():
    """A copy of the model would compute with the initial value."""
    with pytest.raises(InputError, match=r"model: uses blocks.0.weight of the script's model"):
        trainer(Net(heads=2)).recipe.job()


def test_callbacks_that_read_the_model_get_one_note(capsys):
    model = Net()
    seen = []
    trainer(model, callbacks=[lambda *_: seen.append(model.state_dict())]).train()
    assert len(seen) == 2
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "note:" in line)
    assert "callbacks see the model's initial weights" in note


def test_other_callbacks_get_no_note(capsys):
    trainer(Net(), callbacks=[lambda step, values: (step, values["loss"])]).train()
    assert "note:" not in capsys.readouterr().out


class Followed(Net):
    """Notes where it is moved to."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def to(self, *args, **kwargs):
        self.moves += args
        return super().to(*args, **kwargs)


@pytest.mark.parametrize("fails", [False, True])
def test_the_script_has_its_model_back_on_the_device_on_which_it_had_it(fails):
    """Ranks train copies of what is in the host's memory; here that is no other device."""
    model = Followed()

    def callback(*_):
        if fails:
            raise KeyError("x")

    with pytest.raises(KeyError) if fails else nullcontext():
        trainer(model, callbacks=[callback]).train()
    assert model.moves == ["cpu", model.head.weight.device]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_script_that_is_interrupted_has_the_weights_of_the_last_step(error):
    torch.manual_seed(3)
    model = Net()
    whole = deepcopy(model)

    def callback(step, _):
        if step == 1:
            raise error

    with pytest.raises(error):
        trainer(model, steps=9, callbacks=[callback]).train()
    trainer(whole, steps=2).train()
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
