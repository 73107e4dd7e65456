"""The loss without one is that of the model's kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import sailor
from simulator.documents.problems import InputError
from worker.data.sample_checks import check_sample
from worker.script.losses import default_loss, sum_and_count, tried_at_first

LOGITS = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, -100, 4, 5]] * 3)


def model(kind):
    module = nn.Identity()
    module.loss_type = kind
    return module


def mean(found):
    total, count = found
    return total / count


@pytest.mark.parametrize("kind", ["ForCausalLM", None])
def test_a_language_model_predicts_one_token_ahead(kind):
    wanted = functional.cross_entropy(LOGITS[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    found = default_loss(model(kind))(LOGITS, {"labels": LABELS})
    torch.testing.assert_close(mean(found), wanted)


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForTokenClassification"])
def test_labels_of_tokens_are_not_moved_for_models_that_fill_them_in(kind):
    wanted = functional.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten())
    found = default_loss(model(kind))(LOGITS, {"labels": LABELS})
    torch.testing.assert_close(mean(found), wanted)


def test_label_smoothing_is_that_of_transformers():
    theirs = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother
    wanted = theirs(epsilon=0.1)({"logits": LOGITS}, LABELS, shift_labels=True)
    found = default_loss(model("ForCausalLM"), smoothing=0.1)(LOGITS, {"labels": LABELS})
    torch.testing.assert_close(mean(found), wanted)


def test_a_kind_without_a_default_needs_a_loss():
    with pytest.raises(InputError, match="ForCTC"):
        default_loss(model("ForCTC"))


@pytest.mark.parametrize(
    ("logits", "labels"),
    [(torch.zeros(3, 1), torch.tensor([1, 0, 1])), (torch.zeros(3, 4), torch.zeros(3, 4))],
)
def test_a_regression_needs_a_loss(logits, labels):
    with pytest.raises(InputError, match="regression"):
        default_loss(model("ForSequenceClassification"))(logits, {"labels": labels})


@dataclass
class Scores:
    """What a module of plain torch may return."""

    logits: torch.Tensor
    names: list[str]


class Scored(nn.Sequential):
    def forward(self, x):
        return Scores(super().forward(x), ["a"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.Sequential, Scored])
def test_losses_are_summed_in_32_bits_and_targets_keep_theirs(kind, precision):
    seen = []

    def loss(output, batch):
        target = batch[1]
        if kind is Scored:
            assert output.names == ["a"]
            output = output.logits
        if output.device.type != "meta":
            seen.append((output.dtype, batch[0].dtype, target.dtype))
        return (output.squeeze(-1) - target) ** 2

    # 16 bits have no 4097, and their sums end at 2048 ones (bf16: 256).
    data = [(torch.zeros(4), torch.tensor(4097.0)) for _ in range(16)]
    module = kind(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.zeros_(module[2].bias)
    trainer = sailor.Trainer(
        *(module, data),
        **{"batch_size": 16, "steps": 1, "loss": loss, "precision": precision},
    )
    trainer.train()
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen[-1] == (torch.float32, narrow, torch.float32)
    assert trainer.history[0].loss == pytest.approx(4097.0**2, rel=1e-3)


def test_labels_that_are_the_next_tokens_already_are_not_moved_once_more():
    """A data set of pieces and the pieces one token on, as most scripts of plain torch have."""
    tokens = torch.arange(22).reshape(2, 11) % 7
    logits = torch.zeros(2, 10, 7)
    tail = torch.arange(10) < 5
    moved, masked = tokens[:, 1:], tokens[:, 1:].masked_fill(tail, -100)
    for batch in (
        (tokens[:, :-1], moved),
        {"input_ids": tokens[:, :-1], "labels": masked},
    ):
        with pytest.raises(InputError, match="each label is the next token already"):
            default_loss(model("ForCausalLM"))(logits, batch)
        default_loss(model("ForTokenClassification"))(logits, batch)
    for labels in (tokens[:, :-1], torch.full((2, 10), 3), moved.flip(1)):
        default_loss(model(None))(logits, (tokens[:, :-1], labels))
    same = torch.full((2, 10), 3)
    default_loss(model(None))(logits, (same, same))


def test_samples_of_three_entries_do_not_say_which_are_the_labels():
    batch = (LABELS, torch.ones_like(LABELS), LABELS)
    with pytest.raises(InputError, match="has no default for samples of 3 entries"):
        default_loss(model(None))(LOGITS, batch)


class Named(NamedTuple):
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def test_a_named_tuple_says_which_are_the_labels():
    batch = Named(torch.zeros_like(LABELS), torch.ones_like(LABELS), LABELS)
    wanted = default_loss(model(None))(LOGITS, {"labels": LABELS})
    assert default_loss(model(None))(LOGITS, batch) == wanted
    sample = Named(torch.zeros(2), torch.full((2,), 9), torch.tensor([1, 5]))
    with pytest.raises(InputError, match="has 5 in labels"):
        check_sample(sample, {"labels": 3}, "dataset")


def test_a_model_that_returns_no_logits_needs_a_loss():
    data = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    trainer = sailor.Trainer(Pairs(), data, batch_size=2, steps=1)
    with pytest.raises(InputError, match="has no default for a model that returns a tuple"):
        trainer.train()


class Pairs(nn.Module):
    """Returns its loss beside its result, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x):
        return self.blocks(x), None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "metric error: returns None; .* gets no labels"),
        (0.5, "metric error: returns a float; .* as tensors"),
        ({"error": LOGITS}, "metric error: returns a dict"),
        ((LOGITS.sum(), None), "not a sum and a count"),
        (LOGITS, "metric error: returns 3 x 5 x 7 values for 3 samples"),
    ],
)
def test_what_is_no_tensor_is_refused_with_the_name_of_its_function(found, reason):
    with pytest.raises(InputError, match=reason):
        sum_and_count(found, {"labels": LABELS}, "metric error")


def test_a_pair_that_is_no_sum_and_count_is_refused():
    with pytest.raises(InputError, match="not a sum and a count"):
        sum_and_count((torch.tensor(1.0), LOGITS), {"labels": LABELS})


@pytest.mark.parametrize(
    ("loss", "batch", "said"),
    [
        (
            nn.CrossEntropyLoss(),
            (LOGITS, LABELS),
            r"CrossEntropyLoss, .*\(output, batch\[1\]\)",
        ),
        (functional.mse_loss, {"labels": LABELS}, r'mse_loss, .*, batch\["labels"\]\)'),
        (
            partial(functional.cross_entropy, label_smoothing=0.1),
            (LOGITS, LABELS),
            "cross_entropy,",
        ),
    ],
    ids=["module", "function", "partial"],
)
def test_a_loss_of_torch_that_would_get_a_whole_batch_is_refused(loss, batch, said):
    with pytest.raises(InputError, match=f"loss: is torch's {said}"):
        tried_at_first("loss", loss, {})(LOGITS, batch)


def test_a_loss_of_torch_gets_a_batch_that_is_a_tensor():
    assert tried_at_first("loss", functional.mse_loss, {})(LOGITS, LOGITS) == 0
