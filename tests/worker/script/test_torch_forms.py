"""Optimizers, loaders, batches and modules in torch's own forms train as a loop of torch does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import sailor
from simulator.documents.problems import InputError
from worker.data.datasets.map_dataset import default_collate


def two_layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


class Moe(nn.Module):
    """A mixture of experts as scripts write them, with an adapter in later blocks."""

    def __init__(self, index):
        super().__init__()
        self.index, self.router = index, nn.Linear(8, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.adapter = nn.Linear(8, 8)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + out + (self.adapter(x) if self.index else 0)


def mixture():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), Moe(0), Moe(1), nn.Linear(8, 3))


def test_experts_that_only_some_tokens_choose_train_as_by_torch():
    """A pass over zeros chooses the same experts for all tokens."""
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(16)]
    module, wanted = mixture(), mixture()
    made = torch.optim.SGD(wanted.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sailor.Trainer(module, data, batch_size=16, steps=2, optimizer=optimizer).train()
    inputs, labels = torch.stack([x for x, _ in data]), torch.arange(16) % 3
    taken = set()
    for _ in range(2):
        made.zero_grad()
        nn.functional.cross_entropy(wanted(inputs), labels).backward()
        taken |= {name for name, p in wanted.named_parameters() if p.grad is not None}
        made.step()
    assert "2.adapter.weight" in taken
    assert sum("1.experts" in name for name in taken) > 4, "more than two experts"
    begun = dict(mixture().named_parameters())
    for name, found in module.named_parameters():
        torch.testing.assert_close(found, wanted.get_parameter(name), rtol=1e-5, atol=1e-6)
        assert torch.equal(found, begun[name]) != (name in taken), name


def test_parameters_that_no_code_uses_get_a_note_alone_too(capsys):
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.spare = two_layers(), nn.Linear(2, 2)

        def forward(self, x):
            return self.layers(x)

    sailor.Trainer(Spare(), [(torch.ones(4), 0)] * 2, batch_size=2, steps=1).train()
    assert "note: no result depends on spare.bias" in capsys.readouterr().out


class Seen(nn.Linear):
    """Keeps what it has computed, to be looked at."""

    def forward(self, x):
        self.scores = super().forward(x).softmax(-1)
        return x * self.scores


def test_a_module_that_has_computed_before_trains():
    module = nn.Sequential(Seen(4, 4), nn.Linear(4, 3))
    module(torch.ones(1, 4))
    before = module[0].weight.clone()
    sailor.Trainer(module, [(torch.ones(4), 0)] * 2, batch_size=2, steps=1).train()
    assert not torch.equal(module[0].weight, before)


def assert_trained_as_by_torch(model=two_layers, scheduler=lambda _: None, **more):
    """Train alone, and by a loop of torch, with an SGD of two groups."""
    data = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(8)]

    def optimizer(module):
        settings = {"momentum": 0.9, "nesterov": True}
        groups = [
            {"params": module[0].parameters(), "weight_decay": 0.5},
            {"params": module[1:].parameters(), "lr": 0.3},
        ]
        return torch.optim.SGD(groups, lr=0.1, weight_decay=0.25, **settings)

    module, wanted = model(), model()
    given = {"optimizer": optimizer, "scheduler": scheduler, "shuffle": False, **more}
    trainer = sailor.Trainer(module, data, batch_size=8, steps=3, eval_dataset=data, **given)
    trainer.train()
    made, inputs = optimizer(wanted), torch.stack([each[0] for each in data])
    labels, schedule = torch.tensor([each[1] for each in data]), scheduler(made)
    for report in trainer.history:
        assert report.learning_rate == pytest.approx(made.param_groups[0]["lr"])
        made.zero_grad()
        nn.functional.cross_entropy(wanted(inputs), labels).backward()
        made.step()
        if schedule is not None:
            schedule.step()
    for found, expected in zip(module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_decay_and_nesterovs_momentum_of_sgd_are_torchs():
    assert_trained_as_by_torch()


def test_each_group_may_have_a_schedule_of_its_own():
    """Here the first group begins with the second step, as where layers are unfrozen one by one."""

    def scheduler(made):
        factors = [lambda step: min(step, 1), lambda step: 0.5**step]
        return torch.optim.lr_scheduler.LambdaLR(made, factors)

    assert_trained_as_by_torch(scheduler=scheduler)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_inputs_of_another_type_than_the_module_are_converted(dtype):
    data = [(torch.sin(torch.arange(4.0) * i).to(dtype), i % 3) for i in range(8)]
    losses = []
    for samples in (data, [(x.float(), label) for x, label in data]):
        trainer = sailor.Trainer(
            two_layers(), samples, batch_size=4, steps=2, recompute="none", eval_dataset=samples
        )
        trainer.train()
        losses.append([report.loss for report in trainer.history])
    assert losses[0] == losses[1]


def test_dropout_and_batch_norm_in_evaluation_stay_there_also_after_evaluations():
    def model():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(8)
        norm.running_mean += 0.3
        norm.running_var *= 0.5
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9).eval(), norm.eval(), nn.Linear(8, 3))

    assert_trained_as_by_torch(model, eval_every=1)


def test_drop_last_shortens_an_epoch_and_workers_of_a_loader_load(capsys):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    data = [(torch.ones(2), index % 2) for index in range(10)]
    given = {"drop_last": True, "num_workers": 1, "worker_init_fn": print}
    loader = torch.utils.data.DataLoader(data, 4, **given)
    trainer = sailor.Trainer(module, loader, epochs=3, eval_dataset=loader)
    trainer.train()
    assert len(trainer.history) == 3 * len(loader) == 6
    told = capsys.readouterr().out
    assert told.count("note: dataset: the worker_init_fn of its DataLoader is not called") == 1
    assert any("worker_init_fn" in note for note in trainer.recipe.notes())
    assert trainer.recipe.job().data.num_workers == 1
    with pytest.raises(InputError, match="has 10 samples, which drop_last leaves out of batches"):
        sailor.Trainer(module, loader, batch_size=11, epochs=3)


@pytest.mark.parametrize(
    ("epochs", "samples", "batch_size", "steps"),
    [
        pytest.param(15, 25_000, 24, 15_625, id="15 * (25000 / 24) is 15625.000000000002"),
        pytest.param(1.1, 100, 10, 11, id="1.1 * 100 is 110.00000000000001"),
        pytest.param(0.1 + 0.2, 10, 1, 3, id="0.1 + 0.2 is 0.30000000000000004"),
        pytest.param(1, 25, 10, 3, id="the last batch is filled up"),
        pytest.param(1.21, 25, 10, 4, id="a fourth of a sample more"),
        pytest.param(1e-9, 25, 10, 1, id="at least one step"),
    ],
)
def test_epochs_round_up_to_whole_batches_despite_errors_of_floats(
    epochs, samples, batch_size, steps
):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    given = {"batch_size": batch_size, "epochs": epochs}
    assert sailor.Trainer(module, torch.ones(samples, 2), **given).recipe.steps == steps


def test_errors_of_floats_add_no_step_to_epochs_without_the_last_batch():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loader = torch.utils.data.DataLoader(torch.ones(1_005, 2), 10, drop_last=True)
    assert sailor.Trainer(module, loader, epochs=1.1).recipe.steps == 110, "not 111"


def test_trained_parts_in_evaluation_mode_are_reported():
    """A part of a pretrained model comes in evaluation, and a script may not mean it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())
    model[0].requires_grad_(requires_grad=False).eval()
    trainer = sailor.Trainer(model, [(torch.ones(2), 1)] * 8, batch_size=4, steps=1)
    trainer.train()
    told = [line for line in trainer.recipe.changes() if "in evaluation" in line]
    assert told == ["model: 1 is trained in evaluation (without dropout), as the script left it"]


class Pair(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


@dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor


class ReadsBatch(nn.Module):
    """Takes a whole batch, whose parts it reads by name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    def forward(self, batch):
        return self.blocks(batch.x)


@pytest.mark.parametrize("kind", [Pair, Batch])
def test_a_batch_with_attributes_trains_as_a_tuple_does(kind):
    data = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(8)]
    losses = []
    for make, call in [
        (lambda x, labels: (x, labels), lambda module, batch: module.blocks(batch[0])),
        (kind, lambda module, batch: module(batch)),
    ]:
        torch.manual_seed(3)
        trainer = sailor.Trainer(
            ReadsBatch(),
            data,
            batch_size=4,
            steps=2,
            call=call,
            collate=lambda items, make=make: make(*default_collate(items)),
            eval_dataset=data,
        )
        trainer.train()
        losses.append([report.loss for report in trainer.history])
        losses[-1] += trainer.evaluations[1].values()
    assert losses[0] == losses[1]


def test_a_batch_without_labels_needs_a_loss():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = sailor.Trainer(module, [torch.ones(2)] * 4, batch_size=2, steps=1)
    with pytest.raises(InputError, match="loss: has no default for a batch without labels"):
        trainer.train()


class Slow:
    """Samples whose loading takes longer than a step."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(2), index % 2


def test_steps_tell_of_their_wait_for_samples(capsys):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = sailor.Trainer(module, Slow(), batch_size=2, steps=4)
    trainer.train()
    assert all(report.data_wait_s > 0 for report in trainer.history)
    assert "of it for data" in capsys.readouterr().out
