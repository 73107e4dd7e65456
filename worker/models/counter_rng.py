"""Random numbers as functions of what they are for, the same on every device and in any plan.

Nothing is drawn in order: a number is a hash of its purpose (seed, step, layer, site) and of its
index. So a rank makes just the numbers that it needs, and two ranks that need the same one agree.
Only additions, multiplications, shifts and exclusive ors of integers are used, which are exact on
every device; 32 bits, because that is what vector units multiply.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 2**32
# The multipliers of a well-tested mixing function of 32 bits ("lowbias32", C. Wellons 2018).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def stream_key(*purpose: int | str) -> tuple[int, int]:
    """Turn a purpose into two words that select a stream of random numbers."""
    text = "/".join(f"{len(str(part))}:{part}" for part in purpose)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def random_words(index: Tensor, key: tuple[int, int] | tuple[Tensor, Tensor]) -> Tensor:
    """Return 32 random bits for each index, as int32; ``index`` is int32 and is overwritten.

    The key's words may be int32 tensors that broadcast to the index: a stream for each row.
    """
    first, second = (_signed(word) if isinstance(word, int) else word for word in key)
    return _mixed(_mixed(index.bitwise_xor_(first)).add_(second))


def _mixed(x: Tensor) -> Tensor:
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_signed(_FIRST))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def sample_keys(key: tuple[int, int], samples: Tensor) -> tuple[Tensor, Tensor]:
    """Derive the keys of one stream for each sample from the key of them all."""
    low = random_words(samples.to(torch.int32, copy=True), key)
    return low, random_words(low ^ _signed(0x9E3779B9), key)


def dropout_mask(keys: tuple[Tensor, Tensor], index: Tensor, probability: float) -> Tensor:
    """Say what dropout keeps: one row for each sample, one column for each index.

    The index of an element is its place in the whole activation of one sample, however that
    activation is cut over ranks.
    """
    row, column = keys[0][:, None], keys[1][:, None]
    drawn = random_words(index.expand(len(row), -1).clone(), (row, column))
    return drawn >= round(probability * _WORD) - _WORD // 2


def approx_normal(
    index: Tensor, key: tuple[int, int], *, spread: float, dtype: torch.dtype
) -> Tensor:
    """Return numbers around 0 of standard deviation ``spread``, for each int32 index.

    The sum of four uniform numbers of 16 bits: close to a normal distribution out to three
    deviations and never beyond 3.5, and exact on every device, as no logarithm or cosine would be.
    """
    total = torch.zeros_like(index)
    for half in range(2):
        drawn = random_words(index.clone(), (key[0], key[1] ^ half))
        total += (drawn & 0xFFFF) + (drawn >> 16).bitwise_and_(0xFFFF)
    middle = 2 * 0xFFFF
    deviation = ((0x10000**2 - 1) / 12 * 4) ** 0.5
    exact = torch.promote_types(dtype, torch.float32)
    return (total - middle).to(exact).mul_(spread / deviation).to(dtype)
