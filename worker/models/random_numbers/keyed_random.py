"""Random numbers in a user's code that depend on the sample and not on the plan.

While a layer is computed, torch's random operations are replaced. Each number is a function of
seed, step, sample, layer, the draw's number within the layer, and its place along each dimension
of the sample's tensor. So every plan, every micro batch size and every recomputed pass draws the
same, also where a micro batch pads its samples to another length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.models.random_numbers.counter_rng import random_words, sample_keys, stream_key
from worker.models.random_numbers.microbatch_context import MicroBatch

_ATTENTION = ("scaled_dot_product", "attention_forward")


class RandomnessError(ValueError):
    """The code draws random numbers that cannot be tied to samples."""


class FusedAttentionDropoutError(RandomnessError):
    """A fused attention kernel drops elements; torch's plain attention can be tied to samples."""


class KeyedRandom(TorchDispatchMode):
    """Replaces random operations while one layer is computed."""

    def __init__(self, current: MicroBatch, *, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.has_drawn = False
        self._draws = 0
        self._current, self._layer = current, layer

    def begin_layer(self, layer: int) -> None:
        """Draw the numbers of another layer from now on."""
        self._draws, self._layer = 0, layer

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        replacement = _REPLACEMENTS.get(name)
        if replacement is not None:
            return replacement(self, *args, **kwargs)
        if _is_attention(name):
            raise FusedAttentionDropoutError("has dropout inside a fused attention kernel")
        raise RandomnessError(f"draws random numbers by torch's {name}")

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return numbers in [0, 1), of which each sample has its own rows."""
        current, samples = self._current, len(self._current.samples)
        if len(shape) == 0 or shape[0] % samples:
            sizes = " x ".join(map(str, shape)) or "1"
            what = f"draws {sizes} random numbers for {samples} samples"
            raise RandomnessError(f"{what}; their first dimension must be the samples")
        self.has_drawn = True
        self._draws += 1
        key = stream_key("random", current.seed, current.step, self._layer, self._draws)
        keys = sample_keys(key, current.samples.to(device))
        *outer, inner = shape[0] // samples, *shape[1:]
        for size in outer:
            # Attention of a padded sample has more keys for each query: no running index would do.
            keys = sample_keys(*_add_dimension(keys, size))
        low_and_high, index = _add_dimension(keys, inner)
        drawn = random_words(index, low_and_high)
        # 24 bits: every number is exact in fp32, and below 1.
        return (drawn >> 8).bitwise_and_(2**24 - 1).to(torch.float32).mul_(2.0**-24).view(shape)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return numbers of a standard normal distribution."""
        radius = (-2 * torch.log1p(-self.uniform(shape, device))).sqrt()
        return radius * torch.cos(2 * math.pi * self.uniform(shape, device))


def _add_dimension(keys: tuple[Tensor, Tensor], size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return keys with one more dimension, and the places along it for each of them."""
    low, high = keys
    places = torch.arange(size, dtype=torch.int32, device=low.device)
    return (low[..., None], high[..., None]), places.expand(*low.shape, size).clone()


def draws_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation of torch draws random numbers, given its arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not _is_attention(func._overloadpacket.__name__) or _drops(func, args, kwargs)


def _is_attention(name: str) -> bool:
    return any(part in name for part in _ATTENTION)


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given > 0)
    return False


def _native_dropout(
    random: KeyedRandom, x: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = random.uniform(x.shape, x.device) < 1 - p
    return x * (kept.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))), kept


def _bernoulli_in_place(random: KeyedRandom, x: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return x.copy_(random.uniform(x.shape, x.device) < p)


def _bernoulli(random: KeyedRandom, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
    return (random.uniform(x.shape, x.device) < (x if p is None else p)).to(x.dtype)


def _uniform_in_place(
    random: KeyedRandom, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> Tensor:
    return x.copy_(random.uniform(x.shape, x.device) * (high - low) + low)


def _normal_in_place(
    random: KeyedRandom, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> Tensor:
    return x.copy_(random.normal(x.shape, x.device) * std + mean)


def _exponential_in_place(random: KeyedRandom, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(-torch.log1p(-random.uniform(x.shape, x.device)) / rate)


def _uniform_like(random: KeyedRandom, x: Tensor, **options: Any) -> Tensor:
    return random.uniform(x.shape, x.device).to(options.get("dtype") or x.dtype)


def _normal_like(random: KeyedRandom, x: Tensor, **options: Any) -> Tensor:
    return random.normal(x.shape, x.device).to(options.get("dtype") or x.dtype)


def _uniform_of(random: KeyedRandom, size: Sequence[int], **options: Any) -> Tensor:
    device = options.get("device") or torch.device("cpu")
    return random.uniform(size, device).to(options.get("dtype") or torch.get_default_dtype())


def _normal_of(random: KeyedRandom, size: Sequence[int], **options: Any) -> Tensor:
    device = options.get("device") or torch.device("cpu")
    return random.normal(size, device).to(options.get("dtype") or torch.get_default_dtype())


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "native_dropout": _native_dropout,
    "bernoulli_": _bernoulli_in_place,
    "bernoulli": _bernoulli,
    "uniform_": _uniform_in_place,
    "normal_": _normal_in_place,
    "exponential_": _exponential_in_place,
    "rand_like": _uniform_like,
    "randn_like": _normal_like,
    "rand": _uniform_of,
    "randn": _normal_of,
}
