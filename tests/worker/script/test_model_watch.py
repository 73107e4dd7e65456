"""Callbacks that change the script's model or optimizer are refused: ranks train copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sailor
from simulator.documents.problems import InputError

DATA = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(8)]
STEPS = 3


class Net(nn.Module):
    """Two blocks, the first of them frozen, a head and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(1))
        self.blocks[0].requires_grad_(requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x * self.scale))


def trainer_with(change):
    """Return a trainer whose callback makes a change after the second step, and its calls."""
    torch.manual_seed(0)
    model, calls = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def callback(step, _):
        calls.append(step)
        if step == 1:
            change(model, optimizer, scheduler)

    trainer = sailor.Trainer(
        *(model, DATA),
        batch_size=4,
        steps=STEPS,
        loss=lambda output, batch: cross_entropy(output, batch[1]),
        optimizer=optimizer,
        scheduler=scheduler,
        callbacks=[callback],
    )
    return trainer, calls


def replace_head(model, *_):
    model.head = nn.Linear(4, 3)


def edit_group(**settings):
    return lambda _, optimizer, __: optimizer.param_groups[0].update(settings)


def add_group(_, optimizer, __):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def take_from_group(_, optimizer, __):
    del optimizer.param_groups[0]["params"][0]


def zero(model, *_):
    with torch.no_grad():
        model.head.weight.zero_()


def step_own_optimizer(model, *_):
    model(DATA[0][0][None]).sum().backward()
    torch.optim.SGD(model.head.parameters(), lr=0.1).step()


REFUSED = {
    "unfrozen": (
        lambda m, *_: m.blocks[0].requires_grad_(),
        r"requires_grad of blocks.0.weight and",
    ),
    "frozen": (lambda m, *_: m.head.bias.requires_grad_(False), r"requires_grad of head.bias,"),
    "rate": (edit_group(lr=0.05), r"lr of the optimizer's group 0,.* give .* as scheduler="),
    "decay": (edit_group(weight_decay=0.5), r"weight_decay of the optimizer's group 0,"),
    "rate as tensor": (edit_group(lr=torch.tensor(0.1)), r"lr of the optimizer's group 0,"),
    "schedule": (lambda *given: given[2].step(), r"lr of the optimizer's group 0,"),
    "group": (add_group, r"params of the optimizer's group 1 and"),
    "members": (take_from_group, r"params of the optimizer's group 0,"),
    "weights": (zero, r"head.weight, which"),
    "frozen weights": (lambda m, *_: m.blocks[0].bias.data.zero_(), r"blocks.0.bias, which"),
    "clipped": (lambda m, *_: m.head.weight.data[0].clamp_(0, 1), r"head.weight, which"),
    "new memory": (lambda m, *_: setattr(m.head.bias, "data", torch.ones(3)), r"head.bias,"),
    "new part": (replace_head, r"head.weight and 1 more,"),
    "buffer": (lambda m, *_: m.scale.mul_(2), r"scale, which"),
    "loaded": (lambda m, *_: m.load_state_dict(m.state_dict()), r"blocks.0.weight and"),
    "own optimizer": (step_own_optimizer, r"head.weight and 1 more,"),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize(("change", "names"), REFUSED.values(), ids=REFUSED)
def test_a_callback_that_changes_what_is_trained_is_refused_by_name(change, names):
    with pytest.raises(InputError, match=f"callbacks: change {names}"):
        trainer_with(change)[0].train()


def test_a_next_generation_is_not_built_from_what_a_callback_changed():
    """A process that goes on after the refusal still has the script's model."""
    trainer, calls = trainer_with(lambda model, *_: model.blocks[0].weight.data.zero_())
    for _ in range(2):
        with pytest.raises(InputError, match=r"callbacks: change blocks.0.weight"):
            trainer.train()
    assert calls == [0, 1]


def test_modes_that_a_callback_leaves_reach_no_rank():
    trainer, calls = trainer_with(lambda model, *_: model.eval())
    trainer.train()
    assert calls == [*range(STEPS)]
    assert all(part.training for part in trainer.recipe.skeleton().modules())


def test_numbers_that_a_callback_changes_get_one_note_and_reach_no_rank(capsys):
    def change(model, *_):
        model.drop.p = 0.5

    trainer, calls = trainer_with(change)
    trainer.train()
    assert calls == [*range(STEPS)]
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "note:" in line)
    assert note.startswith("note: callbacks change drop.p of the script's model")
    assert trainer.recipe.skeleton().drop.p == 0.1


def test_not_a_number_in_the_model_is_no_change(capsys):
    trainer, calls = trainer_with(lambda *_: None)
    trainer.recipe.model.best = math.nan
    trainer.train()
    assert calls == [*range(STEPS)]
    assert "note:" not in capsys.readouterr().out


def test_a_callback_may_change_a_copy_and_draw_numbers(capsys):
    def change(*_):
        copy = Net()
        torch.optim.SGD(copy.parameters(), lr=0.1).param_groups[0]["lr"] = 1.0
        copy.head.weight.data.zero_()

    trainer, calls = trainer_with(change)
    trainer.train()
    assert calls == [*range(STEPS)]
    assert "note:" not in capsys.readouterr().out
