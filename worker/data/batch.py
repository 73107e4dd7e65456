"""Batches, and the hash of which samples were trained on in which order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_LABEL = -100
"""The label of a token that is not counted, as in PyTorch."""
# A batch's digests are summed in a float: 2^21 of them stay exact below 2^53.
DIGEST_BYTES = 4
SAMPLES_MAX = 2**21


@dataclass(frozen=True, slots=True)
class Samples:
    """Some samples of one batch, one per row."""

    inputs: Any
    """Token ids (rows, sequence), or images (rows, channels, height, width). Of a user's data: a
    batch as their code makes it, labels included."""
    labels: Any
    """The token that follows each input (rows, sequence), or the class of each image (rows).
    ``None`` for a user's data."""
    digests: Tensor
    """One int64 per row: a hash of its content, step and position."""


class DataSource(Protocol):
    """A source of samples."""

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions of the batch of this step."""


def samples_of(
    inputs: NDArray[np.generic], labels: NDArray[np.int64], *, step: int, positions: Sequence[int]
) -> Samples:
    """Build ``Samples`` from rows, with their digests."""
    digests = []
    for position, row, label in zip(positions, inputs, labels, strict=True):
        content = struct.pack("<QQ", step, position) + row.tobytes() + label.tobytes()
        digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
        digests.append(int.from_bytes(digest, "little"))
    return Samples(
        torch.from_numpy(np.ascontiguousarray(inputs)),
        torch.from_numpy(np.ascontiguousarray(labels)),
        torch.tensor(digests, dtype=torch.int64),
    )


FIRST_HASH = "0" * 16
"""The hash before the first batch."""


def next_hash(before: str, *, step: int, digest_sum: int) -> str:
    """Extend the hash of the sample order by one batch, given the sum of its digests.

    The sum does not depend on which rank consumed which samples. Each digest includes its position,
    so exchanged samples change the sum.
    """
    text = f"{before}/{step}/{digest_sum}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
