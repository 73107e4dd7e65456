"""The vote that ends every step: one all-reduce after which all ranks know the same totals.

The vector has a slot for every atom of every layer. The owner of the atom's bucket writes its
squared gradient norm there, all others 0, so the sum is exact in any order and the norm is
bit-equal under every plan. Further slots hold the loss, the number of labels, the digests of the
samples, and whether a rank wants to stop. A rank votes only when its own gradients are complete, so
the result proves that the gradients are complete on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.distributed.interface import Collective
from worker.layout.rank_layout import Holdings, all_buckets
from worker.models.loss import check_whole
from worker.training.flat_buffers import LayerBuffer

_CHUNK = 2**16
_CHUNK_ON_GPU = 2**24
"""Norms are summed in chunks of this many elements, counted from the start of the atom."""


@dataclass(frozen=True, slots=True)
class StepContribution:
    """What one rank contributes besides its norms."""

    loss_sum: float | Tensor = 0.0
    samples: int = 0
    labels: int | Tensor = 0
    digest_sum: int = 0
    wants_to_stop: bool = False


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks know after the vote."""

    squares: Mapping[int, float]
    """The squared norm of each layer's gradients, layers descending."""
    loss_sum: float
    samples: int
    labels: int
    digest_sum: int
    stop: bool
    slots: list[float]
    """The raw all-reduce result, forwarded to ranks that missed it."""

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares.values()))

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss_sum) and all(map(math.isfinite, self.squares.values()))


class StepVote:
    """One rank's part in the vote of each step."""

    def __init__(
        self, rank: int, holdings: Holdings, group: Collective | None, device: torch.device
    ) -> None:
        self._rank = rank
        self._ranks = 1 if group is None else group.size
        self._group = group
        self._device = device
        self._owned = [bucket for bucket in all_buckets(holdings) if bucket.owner == rank]
        self._layers = sorted(holdings.holders, reverse=True)
        self._per_layer = holdings.atoms + 1

    def cast(
        self, buffers: Mapping[int, LayerBuffer], contribution: StepContribution
    ) -> StepTotals:
        """Send this rank's norms and contribution, wait for the others, and return the totals."""
        count = self._per_layer * len(self._layers) + 5
        slots = torch.zeros(count, dtype=torch.float64, device=self._device)
        for bucket in self._owned:
            buffer = buffers[bucket.layer]
            first = self._layers.index(bucket.layer) * self._per_layer
            for atom in bucket.atoms:
                image = buffer.gather_atoms(buffer.gradient, range(atom, atom + 1))
                slots[first + atom] = square_sum(image)
            if bucket.with_unsplit:
                slots[first + self._per_layer - 1] = square_sum(
                    buffer.unsplit_part(buffer.gradient)
                )
        fields = (
            contribution.loss_sum,
            contribution.samples,
            contribution.labels,
            contribution.digest_sum,
            contribution.wants_to_stop,
        )
        for place, value in enumerate(fields, start=len(slots) - len(fields)):
            slots[place] = value
        group = self._group
        return self.totals_from(slots.tolist() if group is None else group.read_sum(slots))

    def first_bad_layer(self, layer: int | None) -> tuple[int, int] | None:
        """Return the first layer that any rank names, with that rank."""
        named = torch.zeros(self._ranks, dtype=torch.float64, device=self._device)
        if layer is not None:
            named[self._rank] = layer + 1
        group = self._group
        layers = named.tolist() if group is None else group.read_sum(named)
        return min(
            ((int(each) - 1, rank) for rank, each in enumerate(layers) if each), default=None
        )

    def totals_from(self, slots: list[float]) -> StepTotals:
        """Return the totals that the sum of all ranks' slots holds."""
        *squares, loss_sum, samples, labels, digest_sum, stop = slots
        check_whole(labels)
        size = self._per_layer
        by_layer = {
            layer: sum(squares[number * size : (number + 1) * size])
            for number, layer in enumerate(self._layers)
        }
        return StepTotals(
            by_layer, loss_sum, int(samples), int(labels), int(digest_sum), stop > 0, slots
        )


def square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares in fp64, always in the same chunks and so with the same bits.

    On a GPU a chunk is summed in its own format, in one kernel that reads each value once: a copy
    in fp64 takes seven times the traffic, and the norm decides only how much is clipped.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.device.type == "cuda":
        for begin in range(0, len(flat), _CHUNK_ON_GPU):
            part = flat[begin : begin + _CHUNK_ON_GPU]
            total += torch.linalg.vector_norm(part).double().square()
        return total
    for begin in range(0, len(flat), _CHUNK):
        wide = flat[begin : begin + _CHUNK].double()
        total += torch.dot(wide, wide)
    return total
