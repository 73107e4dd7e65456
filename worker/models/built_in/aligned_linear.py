"""Linear layers with any number of outputs, computed with as many as GPUs are fast with.

A GPU's fast kernels for 16-bit and TF32 products need rows whose length is a multiple of 16 bytes.
A vocabulary of 50,257 makes logits that are not, and on an H100 such a head took more than twice as
long as an aligned one. So the product is computed with a few outputs more, which are cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

ALIGNED = 8
"""Outputs: 16 bytes of a 16-bit format."""


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what ``torch.nn.functional.linear`` does, on a GPU by aligned products."""
    missing = -weight.shape[0] % ALIGNED
    if not missing or not needs_alignment(x.device):
        return functional.linear(x, weight, bias)
    wide = functional.pad(weight, (0, 0, 0, missing))
    wide_bias = None if bias is None else functional.pad(bias, (0, missing))
    return functional.linear(x, wide, wide_bias)[..., : weight.shape[0]]


def needs_alignment(device: torch.device) -> bool:
    """Return whether products on a device are slow if their outputs are not aligned."""
    return device.type == "cuda"


class AlignedLinear(nn.Linear):
    """A linear layer whose number of outputs does not matter for its speed."""

    def forward(self, x: Tensor) -> Tensor:
        return aligned_linear(x, self.weight, self.bias)
