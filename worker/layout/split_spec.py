"""How a layer says which of its parts tensor parallelism may cut.

A layer class has ``splits: ClassVar[dict[str, Cut]]``, from the dotted name of a submodule to
how it may be cut; what is not named there is whole on every rank:

- ``columns``: a linear layer of which each rank computes some of the outputs,
- ``rows``: a linear layer of which each rank has some of the inputs; their results are summed,
- ``vocabulary``: an embedding's rows, or the outputs of the projection onto the vocabulary,
- ``entry``: an identity that stands before all ``columns`` beside it: its gradient is the sum of
  theirs over the ranks, made once for all of them; without one, each sums its own,
- ``heads``: a dropout of attention scores (batch, heads, queries, keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

SplitKind = Literal["columns", "rows", "vocabulary", "entry", "heads"]
SPLIT_KINDS: tuple[SplitKind, ...] = get_args(SplitKind)


def splits_of(layer: object) -> Mapping[str, SplitKind]:
    """Return what a layer says of itself; nothing said means: nothing may be cut."""
    declared: Mapping[str, SplitKind] = getattr(layer, "splits", {})
    return declared
