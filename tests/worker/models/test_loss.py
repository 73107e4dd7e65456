"""The loss is a sum over labels, the same however the vocabulary is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simulator.documents.problems import InputError
from tests.worker.threads import run_as_threads
from worker.models.loss import check_whole, loss_sum, whole_or_nan


def case(vocabulary: int, padded: int, *, scale: float = 3.0, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, padded, generator=draw, dtype=torch.float64) * scale
    labels = torch.randint(vocabulary, (2, 5), generator=draw)
    labels[0, 1] = labels[1, 4] = -100
    return logits, labels


def oracle(logits, labels, vocabulary: int) -> tuple[float, np.ndarray]:
    """Return loss and gradient by their definition, in numpy."""
    flat, wanted = logits.flatten(0, 1).numpy(), labels.flatten().numpy()
    loss, gradient = 0.0, np.zeros_like(flat)
    for row, label in enumerate(wanted):
        if label < 0:
            continue
        real = flat[row, :vocabulary]
        total = np.log(np.exp(real - real.max()).sum()) + real.max()
        loss += total - real[label]
        gradient[row, :vocabulary] = np.exp(real - total)
        gradient[row, label] -= 1
    return loss, gradient.reshape(logits.shape)


def by_ranks(ranks: int, logits, labels, vocabulary: int):
    def body(transport):
        group = transport.group(tuple(range(ranks)))
        own = logits.chunk(ranks, -1)[transport.rank].clone().requires_grad_()
        loss = loss_sum(own, labels, vocabulary=vocabulary, group=group)
        (2.0 * loss).backward()
        return loss.detach(), own.grad / 2

    made = run_as_threads(ranks, body)
    losses = {str(loss.item()) for loss, _ in made}
    assert len(losses) == 1, "ranks disagree about the loss"
    return made[0][0], torch.cat([gradient for _, gradient in made], -1)


@pytest.mark.parametrize(("vocabulary", "padded"), [(12, 12), (9, 12), (5, 8), (3, 8), (1, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_loss_and_gradient_match_the_definition(
    vocabulary: int, padded: int, ranks: int, scale: float
) -> None:
    logits, labels = case(vocabulary, padded, scale=scale)
    loss, gradient = oracle(logits, labels, vocabulary)
    mine, its = by_ranks(ranks, logits, labels, vocabulary)
    assert mine.item() == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(its.numpy(), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_without_labels_has_no_loss_and_no_gradient(ranks: int) -> None:
    logits, labels = case(8, 8)
    loss, gradient = by_ranks(ranks, logits, torch.full_like(labels, -100), 8)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_half_precision_logits_are_summed_in_fp32(ranks: int) -> None:
    logits, labels = case(8, 8)
    half = logits.bfloat16()
    loss, gradient = by_ranks(ranks, half, labels, 8)
    exact, _ = oracle(half.double(), labels, 8)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_non_finite_logit_shows_in_the_loss_of_every_rank(ranks: int, wrong: float) -> None:
    logits, labels = case(8, 8)
    logits[0, 0, 6] = wrong
    loss, _ = by_ranks(ranks, logits, labels, 8)
    assert not torch.isfinite(loss)


def test_classes_of_images_have_one_label_each() -> None:
    logits, _ = case(5, 5)
    labels = torch.tensor([4, 0])
    loss = loss_sum(logits[:, 0], labels, vocabulary=5)
    expected, _ = oracle(logits[:, :1], labels[:, None], 5)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


class OnDevice(torch.Tensor):
    """Its value cannot be read without waiting for the device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        reads = {"__float__", "__int__", "__bool__", "__index__", "item", "tolist", "cpu"}
        assert getattr(function, "__name__", "") not in reads, "waits for the device"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("counts", [(3, 4), (3.0, 4.0), (2.5, 4.5), (3, 4.5)])
def test_counts_of_a_loss_are_added_and_checked_without_waiting_for_the_device(counts):
    """Also counts that only together are whole."""
    total = 0
    for count in counts:
        total += whole_or_nan(torch.tensor(count).as_subclass(OnDevice))
    number = float(total.as_subclass(torch.Tensor))
    if all(float(count).is_integer() for count in counts):
        check_whole(number)
        assert number == 7
    else:
        with pytest.raises(InputError, match="a count that is not whole"):
            check_whole(number)
