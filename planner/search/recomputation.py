"""The least seconds in which stages recompute as many layers as their memory requires.

Under the policy ``auto`` a stage recomputes as few layers as make room for its micro batches in
flight; to recompute more only takes longer. Under the other policies times include it already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.pipelines.pipeline_template import NEVER_S, TemplateMaker
from planner.pipelines.stage_memory import TemplateStage, all_range_sums
from planner.search.stage_times import BEHIND_MAX, StageOption, Times
from simulator.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class Recomputation:
    """Tables of the options of one search, computed once."""

    maker: TemplateMaker
    choices: Sequence[StageOption]
    lot_of: Mapping[str, int]
    """A lot with each GPU kind."""
    _known: dict[tuple[int, int], Floats] = field(default_factory=dict)

    @property
    def is_chosen(self) -> bool:
        """Whether stages choose how much they recompute."""
        return any(choice.recompute == "auto" for choice in self.choices)

    def stage(self, choice: StageOption) -> TemplateStage:
        """The option on one of its lots."""
        return TemplateStage(self.lot_of[choice.gpu], choice.tp, choice.recompute)

    def seconds(self, micro_batch: int, fewest: int, most: int) -> Floats:
        """By [micro batches in flight - 1, choice, first layer, end], for any number of pipelines
        from ``fewest`` to ``most``.

        Without a choice it is all 0, for one micro batch in flight only.
        """
        if not self.is_chosen:
            return np.zeros((1, 1, 1, 1))
        if fewest > 1:
            return self._seconds_with(micro_batch, most)
        # One pipeline needs fewer buffers; many have smaller optimizer shards under ZeRO-1.
        alone = self._seconds_with(micro_batch, 1)
        if not self.maker.costs.job.zero:
            return alone
        either: Floats = np.minimum(alone, self._seconds_with(micro_batch, most))
        return either

    def at(self, seconds: Floats, in_flight: Ints, where: tuple[int, Ints, Ints]) -> Floats:
        """The entries of stages at (choice, first layers, ends), by [stage, in flight]."""
        if not self.is_chosen:
            return np.zeros((1, 1))
        choice, first, end = where
        row = np.minimum(in_flight, len(seconds)) - 1
        found: Floats = seconds[row[None, :], choice, first[:, None], end[:, None]]
        return found

    def below_top(self, times: Times, seconds: Floats) -> Floats:
        """By [stages behind or 1, choice, first layer, end]: most seconds of the last backward
        below the stage's last layer.
        """
        if not self.is_chosen:
            return times.below_top[None]
        whole = np.stack([all_range_sums(row) for row in times.forward_work])
        below: Floats = times.below_top + np.minimum(seconds, whole)
        if times.layers - 1 > BEHIND_MAX:
            # Stages that are further ahead may recompute more.
            below[-1] = times.below_top + whole
        return below

    def _seconds_with(self, micro_batch: int, pipelines: int) -> Floats:
        maker = self.maker
        key = (micro_batch, pipelines if maker.costs.job.zero else min(pipelines, 2))
        if key not in self._known:
            layers = maker.costs.layer_count
            first = np.arange(layers + 1)[:, None]
            held_max = min(BEHIND_MAX, layers - 1) + 1
            found = np.zeros((held_max, len(self.choices), layers + 1, layers + 1))
            for number, choice in enumerate(self.choices):
                stage = self.stage(choice)
                for held in range(1, held_max + 1):
                    fewest = maker.memory.fewest_recomputed(stage, micro_batch, pipelines, held)
                    if fewest.any():
                        again = maker.again_s(stage, micro_batch, first, fewest)
                        found[held - 1, number] = np.where(fewest > layers, NEVER_S, again)
            self._known[key] = found
        return self._known[key]
