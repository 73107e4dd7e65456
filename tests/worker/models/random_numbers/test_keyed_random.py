"""Random numbers of a user's code belong to samples, whatever micro batch these are in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from worker.models.random_numbers.keyed_random import KeyedRandom, RandomnessError
from worker.models.random_numbers.microbatch_context import MicroBatch


def computed(act, samples, x, *, step=2, layer=3):
    with KeyedRandom(MicroBatch(1, step, torch.tensor(samples)), layer=layer):
        return act(x)


X = torch.linspace(-1, 1, 3 * 5 * 4).view(3, 5, 4)
DRAWING = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout of channels": lambda x: functional.dropout1d(x, 0.5),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "gumbel": functional.gumbel_softmax,
    "uniform": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x + torch.randn(x.shape),
    "in place": lambda x: x.clone().normal_(),
    "module": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("name", list(DRAWING))
def test_samples_draw_the_same_alone_and_together(name):
    act = DRAWING[name]
    together = computed(act, [4, 9, 6], X)
    alone = [computed(act, [number], X[i : i + 1]) for i, number in enumerate([4, 9, 6])]
    # Not equal to the bit: on some processors products of fewer rows are summed in another order,
    # which a norm of four numbers magnifies. Another draw would differ by 0.01 or more.
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)
    assert torch.equal(together, computed(act, [4, 9, 6], X))
    assert not torch.equal(together, computed(act, [4, 9, 6], X, step=3))
    assert not torch.equal(together, computed(act, [4, 9, 6], X, layer=4))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ((2, 5, 4), (2, 9, 4)),  # Tokens.
        ((2 * 5, 4), (2 * 9, 4)),  # Tokens of all samples one after the other.
        ((2, 1, 4), (2, 9, 4)),
        ((2, 3, 5, 5), (2, 3, 9, 9)),  # Attention, by head, query and key.
        ((2 * 3, 5, 5), (2 * 3, 9, 9)),
        ((2,), (2,)),
    ],
    ids=str,
)
def test_padding_at_the_end_of_a_dimension_changes_no_number(short, long):
    found, padded = (
        KeyedRandom(MicroBatch(1, 2, torch.tensor([7, 3])), layer=0)
        .uniform(shape, X.device)
        .view(2, -1, *shape[1:])
        for shape in (short, long)
    )
    assert torch.equal(found, padded[tuple(slice(size) for size in found.shape)])
    assert len(padded.unique()) == padded.numel()


def test_attention_of_a_padded_sample_drops_the_same():
    def attend(x, length):
        mask = torch.arange(x.shape[1]) < length
        out = functional.scaled_dot_product_attention(x, x, x, mask[None, None], dropout_p=0.3)
        return out[:, :length]

    whole = computed(lambda x: attend(x, 5), [4, 9, 6], functional.pad(X, (0, 0, 0, 4)))
    torch.testing.assert_close(whole, computed(lambda x: attend(x, 5), [4, 9, 6], X))


def test_two_draws_of_a_layer_differ():
    first, second = computed(
        lambda x: torch.stack([torch.rand_like(x) for _ in "ab"]), [1, 2, 3], X
    )
    assert not torch.equal(first, second)


def test_gradients_pass_through_the_dropped_elements_masks():
    x = X.clone().requires_grad_()
    out = computed(lambda x: functional.dropout(x, 0.5), [1, 2, 3], x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.where(out != 0, 2.0, 0.0))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda x: x[torch.randperm(3)], "draws random numbers by torch's randperm"),
        (nn.RReLU(), "rrelu"),
        (lambda x: x + torch.rand(()), "draws 1 random numbers for 3 samples"),
        (lambda x: functional.dropout(x.transpose(0, 1).reshape(20, 3), 0.5), "draws 20 x 3"),
    ],
)
def test_what_cannot_belong_to_samples_is_refused(act, reason):
    with pytest.raises(RandomnessError, match=reason):
        computed(act, [1, 2, 3], X)


def test_numbers_are_uniform_and_normal():
    random = KeyedRandom(MicroBatch(1, 2, torch.arange(500)), layer=0)
    uniform = random.uniform((500, 200), X.device)
    assert 0 <= uniform.min() < 1e-3
    assert 1 - 1e-3 < uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=0.005)
    normal = random.normal((500, 200), X.device)
    assert normal.mean() == pytest.approx(0, abs=0.02)
    assert normal.std() == pytest.approx(1, abs=0.02)
