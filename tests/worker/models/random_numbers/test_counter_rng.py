"""Counter-based random numbers are exact, independent and correctly distributed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.models.random_numbers.counter_rng import (
    approx_normal,
    dropout_mask,
    random_words,
    sample_keys,
    stream_key,
)
from worker.models.random_numbers.dropout import KeyedDropout
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext


def places(first: int, count: int):
    return torch.arange(first, first + count).to(torch.int32)


def reference_words(index: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """The same function in unsigned arithmetic, as published."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    first = mixed(index.astype(np.uint32) ^ np.uint32(key[0]))
    return mixed(first + np.uint32(key[1]))


@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 1000, 40_000])
@pytest.mark.parametrize("first", [0, 5, 2**31 - 20, 2**32 - 500])
def test_random_words_match_unsigned_arithmetic(first: int, count: int) -> None:
    key = stream_key("a purpose", count)
    found = random_words(places(first, count), key).numpy().view(np.uint32)
    assert np.array_equal(found, reference_words(np.arange(first, first + count), key))


def test_random_number_depends_on_its_index_alone() -> None:
    key = stream_key("weights", 1, "x")
    whole = random_words(places(0, 1000), key)
    for first, count in ((0, 1), (3, 64), (999, 1), (17, 911)):
        assert torch.equal(random_words(places(first, count), key), whole[first : first + count])


def test_stream_key_depends_on_every_part_and_its_boundaries() -> None:
    purposes = [("a", 1, 2), ("a", 12), ("a", 2, 1), ("b", 1, 2), ("a1", 2), ("a", "1", 2, ""), ()]
    assert len({stream_key(*purpose) for purpose in purposes}) == len(purposes)


def test_dropout_masks_keep_the_right_fraction_in_every_row_and_column() -> None:
    keys = sample_keys(stream_key("dropout", 0), torch.arange(300))
    for probability in (0.1, 0.5, 0.9):
        mask = dropout_mask(keys, range(300), probability).double()
        kept, deviation = 1 - probability, (probability * (1 - probability)) ** 0.5
        assert abs(mask.mean() - kept) < 4 * deviation / 300
        for lines in (mask.mean(0), mask.mean(1)):
            assert (lines - kept).abs().max() < 5 * deviation / 300**0.5
            assert lines.std() == pytest.approx(deviation / 300**0.5, rel=0.25)


def test_samples_layers_sites_steps_and_seeds_are_independent() -> None:
    samples, index = torch.arange(4), range(20_000)

    def masks(*purpose: int | str):
        return dropout_mask(sample_keys(stream_key(*purpose), samples), index, 0.5).double() - 0.5

    base = masks("dropout", 1, 2, 3, "a")
    others = [("dropout", 2, 2, 3, "a"), ("dropout", 1, 3, 3, "a"), ("dropout", 1, 2, 4, "a")]
    for other in (*others, ("dropout", 1, 2, 3, "b")):
        # Four times the mean product of independent masks is 0 within 1 / sqrt(20000).
        assert (4 * (base * masks(*other)).mean(1)).abs().max() < 5 / 20_000**0.5
    between = 4 * base @ base.T / 20_000
    assert (between - torch.eye(4)).abs().max() < 5 / 20_000**0.5
    shifted = 4 * (base[:, 1:] * base[:, :-1]).mean(1)
    assert shifted.abs().max() < 5 / 20_000**0.5


def test_normal_numbers_have_the_right_mean_deviation_and_bound() -> None:
    drawn = approx_normal(
        places(0, 200_000), stream_key("weights"), spread=0.02, dtype=torch.float64
    )
    assert abs(drawn.mean()) < 5 * 0.02 / 200_000**0.5
    assert drawn.std() == pytest.approx(0.02, rel=0.01)
    assert drawn.abs().max() < 3.47 * 0.02
    within = (drawn.abs() < 0.02).double().mean()
    assert within == pytest.approx(0.675, abs=0.02)  # 0.683 for a normal distribution.
    half = approx_normal(
        places(0, 200_000), stream_key("weights"), spread=0.02, dtype=torch.bfloat16
    )
    single = approx_normal(
        places(0, 200_000), stream_key("weights"), spread=0.02, dtype=torch.float32
    )
    assert torch.equal(half, single.bfloat16())


@pytest.mark.parametrize("first", [0, 2**31 - 20, 2**32 - 20])
def test_a_part_of_a_dropout_mask_is_that_of_the_whole(first: int) -> None:
    keys = sample_keys(stream_key("dropout", 0), torch.arange(3))
    whole = dropout_mask(keys, range(first, first + 64), 0.5)
    assert torch.equal(dropout_mask(keys, range(first + 17, first + 50), 0.5), whole[:, 17:50])
    words = random_words(places(first, 64), (int(keys[0][2]), int(keys[1][2])))
    assert torch.equal(whole[2], words >= 0)


def test_dropout_follows_the_sample_and_not_its_row() -> None:
    context = MicroBatchContext()
    dropout = KeyedDropout(0.5, layer=3, site="mlp", index=0, context=context)
    x = torch.ones(3, 5, 8)
    context.current = MicroBatch(seed=1, step=2, samples=torch.tensor([7, 2, 9]))
    many = dropout(x)
    assert set(many.unique().tolist()) == {0.0, 2.0}
    for row, sample in enumerate((7, 2, 9)):
        context.current = MicroBatch(seed=1, step=2, samples=torch.tensor([sample]))
        assert torch.equal(dropout(x[:1])[0], many[row])
    context.current = MicroBatch(seed=1, step=3, samples=torch.tensor([9]))
    assert not torch.equal(dropout(x[:1])[0], many[2])


def test_dropout_gradient_uses_the_forward_mask() -> None:
    context = MicroBatchContext(MicroBatch(seed=1, step=2, samples=torch.tensor([7, 2])))
    dropout = KeyedDropout(0.25, layer=3, site="mlp", index=0, context=context)
    x = torch.randn(2, 50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dropout, (x,))


def test_dropout_needs_a_micro_batch() -> None:
    dropout = KeyedDropout(0.5, layer=0, site="a", index=0, context=MicroBatchContext())
    with pytest.raises(AssertionError, match="no micro batch"):
        dropout(torch.ones(1, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("first", [0, 2**32 - 500])
def test_gpu_and_cpu_random_numbers_are_bit_equal(first: int) -> None:
    index = places(first, 100_000)
    key = stream_key("weights", 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        here = approx_normal(index, key, spread=0.02, dtype=dtype)
        there = approx_normal(index.cuda(), key, spread=0.02, dtype=dtype)
        assert torch.equal(there.cpu(), here)
    samples, indices = torch.arange(5), range(first, first + 100_000)
    mask = dropout_mask(sample_keys(key, samples), indices, 0.3)
    there = dropout_mask(sample_keys(key, samples.cuda()), indices, 0.3)
    assert torch.equal(there.cpu(), mask)
