"""The loss without one is that of the model's kind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from torch import nn
from torch.nn import functional

import sailor
from simulator.documents.problems import InputError
from worker.script.losses import default_loss, sum_and_count

pytestmark = pytest.mark.torch

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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_summed_in_32_bits_and_targets_keep_theirs(precision):
    seen = []

    def loss(output, batch):
        target = batch[1]
        if output.device.type != "meta":
            seen.append((output.dtype, batch[0].dtype, target.dtype))
        return (output.squeeze(-1) - target) ** 2

    # 16 bits have no 4097, and their sums end at 2048 ones (bf16: 256).
    data = [(torch.zeros(4), torch.tensor(4097.0)) for _ in range(16)]
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.zeros_(module[2].bias)
    trainer = sailor.Trainer(
        *(module, data),
        **{"batch_size": 16, "steps": 1, "loss": loss, "precision": precision},
    )
    trainer.train()
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen[-1] == (torch.float32, narrow, torch.float32)
    assert trainer.history[0].loss == pytest.approx(4097.0**2, rel=1e-3)


def test_a_pair_that_is_no_sum_and_count_is_refused():
    with pytest.raises(InputError, match="not a sum and a count"):
        sum_and_count((torch.tensor(1.0), LOGITS), {"labels": LABELS})
