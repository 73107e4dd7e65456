"""How a layer class declares which of its parts tensor parallelism may split.

A layer class has ``splits: ClassVar[dict[str, SplitKind]]``, from the dotted name of a submodule to
how it may be split. Submodules that are not named are held in full by every rank:

- ``columns``: a linear layer; each rank computes some of the outputs,
- ``rows``: a linear layer; each rank has some of the inputs, and the results are summed,
- ``vocabulary``: an embedding's rows, or the outputs of the projection onto the vocabulary,
- ``entry``: an identity in front of all ``columns`` of the same parent. It sums their input
  gradients over the ranks,
- ``heads``: a dropout of attention scores (batch, heads, queries, keys),
- ``tokens``: an identity behind what a layer knows of each token of a sample. Under sequence
  parallelism it selects the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

SplitKind = Literal["columns", "rows", "vocabulary", "entry", "heads", "tokens"]


def splits_of(layer: object) -> Mapping[str, SplitKind]:
    """Return a layer's ``splits``; empty if it declares none."""
    declared: Mapping[str, SplitKind] = getattr(layer, "splits", {})
    return declared
