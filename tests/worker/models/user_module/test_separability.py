"""Modules whose samples are not computed alone are refused, with the part that mixes them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import sailor
from simulator.documents.problems import InputError
from worker.models.user_module.separability import check_separable
from worker.script.recipe import Recipe


class Mixing(nn.Module):
    """A block that mixes the samples of its batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) - x.mean(0)


class Counting(nn.Module):
    """A block that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Averaging(nn.Module):
    """A block that keeps an average of its inputs for evaluation."""

    def __init__(self, update):
        super().__init__()
        self.linear, self.update = nn.Linear(4, 4), update
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.update(self, x.detach().mean(0))
        return self.linear(x)


def by_data(block, mean):
    block.mean.data.mul_(0.9).add_(mean, alpha=0.1)


def anew(block, mean):
    block.mean = block.mean.mul(0.9).add_(mean, alpha=0.1)


def late(block, mean):
    block.register_buffer("last", mean)


def chain(part):
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 3))


def mean_over_labels(output, batch):
    kept = batch[1] > 0
    return nn.functional.cross_entropy(output[kept], batch[1][kept])


def checked(module, **changes):
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(6)]
    recipe = Recipe(model=module, dataset=data, batch_size=2, steps=1, **changes)
    check_separable(recipe, recipe.examples)


class Drawing(nn.Module):
    """A block whose strength is drawn, but not by torch."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return self.linear(x) * self.draw()


def test_a_module_of_separate_samples_is_accepted():
    checked(chain(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5))))


class Attending(nn.Module):
    """A block with dropout of what attention computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        kept = mask[:, None, :].bool()
        found = nn.functional.scaled_dot_product_attention(x, x, x, kept, dropout_p=0.3)
        return x + self.linear(found)


class Reader(nn.Module):
    """A model of sentences, which may be padded."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x = self.first(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(x)


def test_attention_with_dropout_of_samples_that_are_padded_to_one_another_is_accepted():
    data = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8, 9]}]
    data = [{**each, "labels": each["input_ids"]} for each in data]

    def loss(out, batch):
        count = (batch["labels"] >= 0).sum()
        return nn.functional.cross_entropy(
            out.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        ), count

    recipe = Recipe(
        model=Reader(), dataset=data, batch_size=2, steps=1, collate=sailor.pad, loss=loss
    )
    check_separable(recipe, recipe.examples)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Mixing(), "model: 1: computes two samples together otherwise than each alone"),
        (nn.BatchNorm1d(4), "1 is a BatchNorm1d, which mixes the samples of a micro batch"),
        (
            nn.BatchNorm1d(4, track_running_stats=False).eval(),
            "1 is a BatchNorm1d, which mixes the samples of a micro batch",
        ),
        (Counting(), "the buffer 1.calls changes while the model computes"),
        (Averaging(by_data), "the buffer 1.mean changes while the model computes"),
        (Averaging(anew), "the buffer 1.mean changes while the model computes"),
        (Averaging(late), "the buffer 1.last changes while the model computes"),
        (nn.RReLU(), "model: 1: draws random numbers by torch's rrelu_with_noise"),
    ],
    ids=["mixing", "batch norm", "no statistics", "buffer", "data", "anew", "late", "random"],
)
def test_a_part_that_mixes_samples_is_named(part, reason):
    with pytest.raises(InputError, match=reason):
        checked(chain(part))


class Gated(nn.Module):
    """Blocks and a head that may take more of the first layer than the hidden state."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.head, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), kind
        self.blocks = nn.ModuleList((Faint if kind == "faint" else Scaled)() for _ in range(2))

    def forward(self, x):
        batch, x = x, self.first(x)
        gate = (batch if self.kind == "batch" else x).detach().sigmoid()
        for block in self.blocks:
            block.gate = gate if self.kind == "attribute" else 1.0
        skip = gate if self.kind == "skip" else 0.0
        for block in self.blocks:
            x = block(x, gate if self.kind in ("argument", "faint", "batch") else 1.0)
        return self.head(x + skip)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), 1.0

    def forward(self, x, gate):
        return self.linear(x) * gate * self.gate


class Faint(Scaled):
    """Hardly uses what it is passed, as with weights that are not trained yet."""

    def forward(self, x, gate):
        return super().forward(x, 1 + 1e-9 * gate)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        *(("argument", "blocks.0"), ("faint", "blocks.0")),
        *(("attribute", "blocks.0"), ("skip", "head")),
    ],
)
def test_what_layer_0_computes_beside_the_hidden_state_is_refused_without_a_gradient(kind, named):
    """On another stage its weights are zeros."""
    with pytest.raises(InputError, match=f"{named} uses what layer 0 computes beside the hidden"):
        checked(Gated(kind))


@pytest.mark.parametrize("kind", ["batch", "none"])
def test_what_is_computed_from_the_batch_may_reach_blocks(kind):
    checked(Gated(kind))


def test_a_mean_over_labels_is_refused_as_a_loss():
    with pytest.raises(InputError, match="model: head: computes two samples together"):
        checked(chain(nn.ReLU()), loss=mean_over_labels)


class Differentiating(nn.Module):
    """A block that switches gradients on, as models of forces do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.enable_grad()
    def forward(self, x):
        return self.linear(x * torch.ones((), requires_grad=True))


def test_a_block_that_switches_gradients_on_is_compared_without_a_warning():
    """Warnings are errors in tests."""
    checked(chain(Differentiating()))


def by_python():
    return random.random()


def by_numpy():
    return np.random.rand()


@pytest.mark.parametrize("draw", [by_python, by_numpy])
def test_numbers_that_are_not_drawn_by_torch_are_refused(draw):
    with pytest.raises(InputError, match="model: 1: draws numbers by Python's random or by numpy"):
        checked(chain(Drawing(draw)))


def test_a_mean_over_labels_is_refused_even_if_the_first_two_samples_have_as_many():
    def mean(output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    torch.manual_seed(0)  # By chance, a mean of means is that of all labels.
    data = [(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(9)]
    recipe = Recipe(model=chain(nn.Tanh()), dataset=data, batch_size=9, steps=1, loss=mean)
    recipe.job()  # Each sample has as many.
    data[7][1][:2] = -100
    for given in (data, sailor.Stream(data)):
        refused(given, mean)


WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def weighted(output, batch):
    return nn.functional.cross_entropy(output, batch[1], weight=WEIGHTS)


def ignoring(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=0)


def masked(output, batch):
    return ((output.sum(-1) ** 2) * batch[1]).sum() / batch[1].sum()


def sorted_by_class():
    """As in a folder of images: only the last ones are of another class."""
    return [(torch.randn(4), index // 90) for index in range(100)]


def pieces(kind):
    found = [(torch.randn(5, 4), torch.arange(5).to(kind) % 2 + 1) for _ in range(9)]
    found[7][1][:3] = 0
    return found


@pytest.mark.parametrize(
    ("data", "mean"),
    [
        (sorted_by_class, weighted),
        (lambda: pieces(torch.int64), ignoring),
        (lambda: pieces(torch.float32), masked),
    ],
    ids=["class weights", "ignore_index", "mask"],
)
def test_a_mean_over_weights_is_refused_even_if_the_first_two_samples_have_the_same(data, mean):
    torch.manual_seed(0)
    refused(data(), mean)


def test_sums_over_weights_are_taken():
    torch.manual_seed(0)

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1], weight=WEIGHTS, reduction="none")

    data = sorted_by_class()
    Recipe(model=chain(nn.Tanh()), dataset=data, batch_size=9, steps=1, loss=loss).job()


def test_a_bad_sample_is_left_to_training():
    torch.manual_seed(0)

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    data = sorted_by_class()
    data[-1] = (torch.full((4,), torch.nan), 2)
    Recipe(model=chain(nn.Tanh()), dataset=data, batch_size=9, steps=1, loss=loss).job()


def refused(data, mean):
    recipe = Recipe(model=chain(nn.Tanh()), dataset=data, batch_size=9, steps=1, loss=mean)
    with pytest.raises(InputError, match="computes two samples together otherwise"):
        recipe.job()


class Widened(nn.Module):
    """Makes its input as long as a plain number of the batch says."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x, count):
        hidden = x.unsqueeze(1).expand(-1, count, -1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def collate(rows):
    x = torch.stack([row["x"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"x": x, "count": max(row["count"] for row in rows), "labels": labels}


@pytest.mark.parametrize("counts", [(2, 2), (2, 3)])
def test_shapes_between_layers_that_depend_on_plain_numbers_are_noted(counts):
    """One stage trains with them; several would not know which shapes to receive."""
    data = [{"x": torch.ones(4), "count": counts[i % 2], "labels": i % 3} for i in range(4)]
    loss = mean_of_samples
    recipe = Recipe(
        model=Widened(), dataset=data, batch_size=2, steps=1, collate=collate, loss=loss
    )
    told = check_separable(recipe, recipe.examples)
    if counts == (2, 2):
        assert told == []
    else:
        assert "hands on 1 x 2 x 4 and 1 x 3 x 4 numbers for two" in told[0]
        for _ in range(2):
            recipe.job()
        assert sum("hands on" in note for note in recipe.notes()) == 1


def mean_of_samples(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])


def with_metric(metric, labels=(0, 1, 2)):
    data = [(torch.full((4,), 1.0 + i), labels[i % 3]) for i in range(6)]
    recipe = Recipe(
        model=chain(nn.Identity()), dataset=data, batch_size=2, steps=1,
        eval_dataset=data, more_metrics={"error": metric},
    )  # fmt: skip
    check_separable(recipe, recipe.examples, evaluated=recipe._load_evaluated())


def test_a_metric_that_is_a_mean_over_labels_is_refused():
    """It would depend on how many samples a plan evaluates at once."""
    with pytest.raises(InputError, match=r"metric error: of two samples together is .* pair"):
        with_metric(lambda output, batch: output.abs().sum() / (1 + batch[1]).sum())


@pytest.mark.parametrize(
    "metric",
    [
        lambda output, batch: (output.argmax(-1) == batch[1]).float(),
        lambda output, batch: (output.abs().sum(), (1 + batch[1]).sum()),
        lambda output, _: output.abs().mean(),
    ],
)
def test_metrics_by_sample_and_sums_are_accepted(metric):
    with_metric(metric)
    with_metric(metric, labels=(1, 1, 1))


class Warming(nn.Module):
    """A block whose strength grows with the passes that it has seen."""

    def __init__(self, used):
        super().__init__()
        self.linear, self.passes, self.used = nn.Linear(4, 4), 0, used

    def forward(self, x):
        self.passes += 1
        return self.linear(x) * (min(self.passes / 100, 1) if self.used else 1)


class Smoothed(nn.Module):
    """A block that subtracts an average of its earlier inputs, kept as a plain tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        out = self.linear(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return out


class Watched(nn.Module):
    """A block that keeps what it has computed last, to be looked at."""

    def __init__(self):
        super().__init__()
        self.linear, self.last, self.length = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.last, self.length = self.linear(x), x.shape[-1]
        return self.last


def notes_of(module):
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(6)]
    recipe = Recipe(model=module, dataset=data, batch_size=2, steps=1)
    return check_separable(recipe, recipe.examples)


class Listed(nn.Module):
    """A block that counts its passes in a mapping."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), {"passes": 0}

    def forward(self, x):
        self.seen["passes"] += 1
        return self.linear(x) * min(self.seen["passes"] / 100, 1)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Warming(True), "1.passes"),
        (Smoothed(), "1.mean"),
        (Listed(), r"1.seen\['passes'\]"),
    ],
)
def test_what_depends_on_earlier_passes_is_refused(part, name):
    with pytest.raises(InputError, match=f"otherwise after other passes, and keeps {name}"):
        notes_of(chain(part))


def test_a_count_of_passes_that_no_result_depends_on_is_noted():
    (note,) = notes_of(chain(Warming(used=False)))
    assert note.startswith("model: 1.passes changes with every pass, and how many there are")


def test_a_block_may_keep_what_it_has_computed_last():
    assert notes_of(chain(Watched())) == []
