"""The vote that ends every step: one sum over all ranks, after which all know the same.

It is a vector with a slot for every atom of every layer, in which exactly one of the atom's
holders puts its squared gradient norm and all others 0: such a sum is exact in any order, so that
the norm has the same bits under every plan. Further slots hold the loss, the number of labels,
the digests of the samples, and whether somebody wishes to stop. A rank votes only when its own
gradients are complete; so whoever has the result knows that everybody's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.distributed.interface import Collective
from worker.layout.rank_layout import Holdings, NormShare, norm_shares
from worker.training.flat_buffers import LayerBuffer

_PORTION = {"cpu": 2**16}
_PORTION_ELSEWHERE = 2**24
"""A norm is summed in portions of this many elements, counted from the beginning of the atom."""


@dataclass(frozen=True, slots=True)
class StepContribution:
    """What one rank has to tell besides its norms."""

    loss_sum: float | Tensor = 0.0
    samples: int = 0
    labels: int = 0
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
    """The sum itself, for those who did not hear of it."""

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares.values()))

    @property
    def is_finite(self) -> bool:
        """Neither the loss nor any gradient has left the numbers."""
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
        self._shares: tuple[NormShare, ...] = norm_shares(holdings).get(rank, ())
        self._layers = sorted(holdings.holders, reverse=True)
        self._per_layer = holdings.atoms + 1

    def cast(self, buffers: Mapping[int, LayerBuffer], ballot: StepContribution) -> StepTotals:
        """Tell what this rank has to tell, wait for the others, and return what came of it."""
        slots = torch.zeros(self._per_layer * len(self._layers) + 5, dtype=torch.float64)
        slots = slots.to(self._device)
        for share in self._shares:
            buffer = buffers[share.layer]
            first = self._layers.index(share.layer) * self._per_layer
            for atom in share.atoms:
                image = buffer.gather_atoms(buffer.gradient, range(atom, atom + 1))
                slots[first + atom] = square_sum(image)
            if share.whole:
                slots[first + self._per_layer - 1] = square_sum(
                    buffer.unsplit_part(buffer.gradient)
                )
        told = (
            ballot.loss_sum,
            ballot.samples,
            ballot.labels,
            ballot.digest_sum,
            ballot.wants_to_stop,
        )
        for place, value in enumerate(told, start=len(slots) - len(told)):
            slots[place] = value
        if self._group is not None:
            self._group.all_reduce(slots)
        return self.verdict(slots.tolist())

    def first_bad_layer(self, layer: int | None) -> tuple[int, int] | None:
        """Of the layers that ranks name, return the first and the rank that names it."""
        named = torch.zeros(self._ranks, dtype=torch.float64, device=self._device)
        if layer is not None:
            named[self._rank] = layer + 1
        if self._group is not None:
            self._group.all_reduce(named)
        return min(
            ((int(each) - 1, rank) for rank, each in enumerate(named.tolist()) if each),
            default=None,
        )

    def verdict(self, slots: list[float]) -> StepTotals:
        """What the sum of all ranks' slots says."""
        *squares, loss_sum, samples, labels, digest_sum, stop = slots
        size = self._per_layer
        by_layer = {
            layer: sum(squares[number * size : (number + 1) * size])
            for number, layer in enumerate(self._layers)
        }
        return StepTotals(
            by_layer, loss_sum, int(samples), int(labels), int(digest_sum), stop > 0, slots
        )


def square_sum(flat: Tensor) -> Tensor:
    """The sum of squares in fp64, always in the same portions and so with the same bits."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    size = _PORTION.get(flat.device.type, _PORTION_ELSEWHERE)
    for begin in range(0, len(flat), size):
        wide = flat[begin : begin + size].double()
        total += torch.dot(wide, wide)
    return total
