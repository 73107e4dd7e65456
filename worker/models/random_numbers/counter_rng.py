"""Counter-based random numbers, the same on every device and under any plan.

A number is a hash of its purpose (seed, step, layer, site) and its index, so a rank generates just
the numbers that it needs and two ranks that need the same number agree. Integer additions,
multiplications, shifts and exclusive ors are exact on every device; 32 bits, because vector units
multiply these.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD_END = 2**32
# The multipliers of the 32-bit hash "lowbias32" (C. Wellons, 2018).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


def stream_key(*purpose: int | str) -> tuple[int, int]:
    """Hash a purpose to the two words that select a stream of random numbers."""
    text = "/".join(f"{len(str(part))}:{part}" for part in purpose)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def random_words(index: Tensor, key: tuple[int, int] | tuple[Tensor, Tensor]) -> Tensor:
    """Return 32 random bits for each index, as int32; ``index`` is int32 and is overwritten.

    The key's words may be int32 tensors that broadcast to the index: one stream for each row.
    """
    first, second = (_as_signed(word) if isinstance(word, int) else word for word in key)
    return _mix(_mix(index.bitwise_xor_(first)).add_(second))


def _mix(x: Tensor) -> Tensor:
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_as_signed(_FIRST))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_as_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _as_signed(word: int) -> int:
    return word - _WORD_END if word >= _WORD_END // 2 else word


def sample_keys(
    key: tuple[int, int] | tuple[Tensor, Tensor], samples: Tensor
) -> tuple[Tensor, Tensor]:
    """Derive the key of a stream for each sample from their common key.

    Given a key for each row, derive one for each place along a dimension.
    """
    low = random_words(samples.to(torch.int32, copy=True), key)
    return low, random_words(low ^ _as_signed(0x9E3779B9), key)


def dropout_mask(keys: tuple[Tensor, Tensor], indices: range, probability: float) -> Tensor:
    """Return which elements dropout keeps: one row for each sample, one column for each index.

    The index of an element is its position in the full activation of one sample, however the
    activation is split over ranks; it wraps around at 32 bits.
    """
    row, column = keys[0][:, None], keys[1][:, None]
    index = torch.empty((len(row), len(indices)), dtype=torch.int32, device=row.device)
    torch.arange(indices.start, indices.stop, out=index[0])
    index[1:] = index[0]
    drawn = random_words(index, (row, column))
    return drawn >= round(probability * _WORD_END) - _WORD_END // 2


def approx_normal(
    index: Tensor, key: tuple[int, int], *, spread: float, dtype: torch.dtype
) -> Tensor:
    """Return numbers of mean 0 and standard deviation ``spread``, one for each int32 index.

    Each is the sum of four uniform 16-bit numbers: close to a normal distribution within three
    deviations, never beyond 3.5, and exact on every device, unlike logarithms and cosines.
    """
    total = torch.zeros_like(index)
    for half in range(2):
        drawn = random_words(index.clone(), (key[0], key[1] ^ half))
        total += (drawn & 0xFFFF) + (drawn >> 16).bitwise_and_(0xFFFF)
    middle = 2 * 0xFFFF
    deviation = ((0x10000**2 - 1) / 12 * 4) ** 0.5
    exact = torch.promote_types(dtype, torch.float32)
    return (total - middle).to(exact).mul_(spread / deviation).to(dtype)
