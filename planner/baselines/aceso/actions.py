"""Aceso's actions: changes that relieve the bottleneck stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from planner.baselines.aceso.cost import AcesoConfig, AcesoJudged, AcesoModel, AcesoStage

# How each action moves the target's time, memory and communication; the order matters.
ACTIONS: dict[str, tuple[int, int, int]] = {
    "dec_op": (-1, -1, 0),
    "inc_dp": (-1, -1, 1),
    "dec_dp": (1, 1, -1),
    "inc_tp": (-1, -1, 1),
    "dec_tp": (1, 1, -1),
    "inc_mbs": (-1, 1, 0),
    "dec_mbs": (1, -1, 0),
}
_Way = tuple[float, AcesoStage]
"""A changed stage, and its expected time in ms."""
ROUNDS_MAX = 5
"""Partners to which operators are moved in one action."""
SIZES_MAX = 8
"""Most GPUs of a stage in the public program."""


def bottleneck(judged: AcesoJudged) -> int:
    """The slowest stage; if memory is exceeded, the stage that holds the most."""
    score = judged.times_ms if judged.fits else judged.memory_mb
    return max(range(len(score)), key=lambda stage: (score[stage], -stage))


@dataclass(slots=True)
class AcesoActions:
    """Applies actions to configurations, and remembers the partners tried."""

    model: AcesoModel
    tried: set[tuple[AcesoConfig, int, int]] = field(default_factory=set)
    """Configuration, target and partner between which operators were moved already."""
    _resizings: dict[object, tuple[_Way | None, _Way | None]] = field(default_factory=dict)
    """By stage, the quickest ways to halve and to double its GPUs."""

    def apply(self, action: str, config: AcesoConfig, target: int) -> AcesoConfig | None:
        """The configuration after an action; ``None`` if the action is impossible."""
        verb, what = action.split("_")
        if what == "op":
            return self._shed_operators(config, target)
        if what == "mbs":
            return self._resize_micro_batch(config, grow=verb == "inc")
        stage = config.stages[target]
        changed = _double(stage, what) if verb == "inc" else _halve(stage, what)
        return None if changed is None else self._trade_gpus(config, target, changed)

    # -- operators --------------------------------------------------------------------------------

    def _shed_operators(self, config: AcesoConfig, target: int) -> AcesoConfig | None:
        """Move operators towards stages with spare time or memory."""
        start, by_time = config, self.model.judge(config).fits
        for _ in range(ROUNDS_MAX):
            judged = self.model.judge(config)
            if judged.fits != by_time:
                break  # The configuration fits now; moving operators for time would undo it.
            partner = self._partner(judged, target)
            if partner is None:
                break
            self.tried.add((config, target, partner))
            moved = None
            for goal in self._goals(judged, target, partner):
                moved = self._shift_operators(config, target, partner, goal, by_time=by_time)
                if moved is not None:
                    break
            if moved is None or moved == config:
                break
            config = moved
            target = bottleneck(self.model.judge(config))
        return None if config == start else config

    def _partner(self, judged: AcesoJudged, target: int) -> int | None:
        score = judged.efficient_ms if judged.fits else [-mb for mb in judged.memory_mb]
        open_stages = [
            stage
            for stage in range(len(score))
            if stage != target
            and (judged.config, target, stage) not in self.tried
            and (score[stage] > 0 or not judged.fits)
        ]
        return max(open_stages, key=lambda stage: (score[stage], -stage), default=None)

    def _goals(self, judged: AcesoJudged, target: int, partner: int) -> list[float]:
        if not judged.fits:
            return [self.model.inputs.memory_mb]
        most = judged.compute_ms[target]
        gap = most - judged.compute_ms[partner]
        return [most - gap * share for share in (0.4, 0.2, 0.0)]

    def _shift_operators(
        self, config: AcesoConfig, target: int, partner: int, goal: float, *, by_time: bool
    ) -> AcesoConfig | None:
        """From target to partner, each stage passes on the fewest operators that bring it below its
        goal.
        """
        stages = list(config.stages)
        step = 1 if partner > target else -1
        for giver in range(target, partner, step):
            one, other = stages[giver], stages[giver + step]
            for count in range(one.end - one.first):
                if step > 0:
                    left = one._replace(end=one.end - count)
                    taker = other._replace(first=other.first - count)
                else:
                    left = one._replace(first=one.first + count)
                    taker = other._replace(end=other.end + count)
                if self._worth(left, config, giver, by_time=by_time) < goal:
                    stages[giver], stages[giver + step] = left, taker
                    break
            else:
                return None
        if self._worth(stages[partner], config, partner, by_time=by_time) >= goal:
            return None
        return replace(config, stages=tuple(stages))

    def _worth(self, stage: AcesoStage, config: AcesoConfig, index: int, *, by_time: bool) -> float:
        if by_time:
            return self.model.predicted_ms(stage, config.micro_batch)
        behind = len(config.stages) - 1 - index
        return self.model.memory_mb(stage, config.micro_batch, behind=behind)

    # -- GPUs -------------------------------------------------------------------------------------

    def _trade_gpus(
        self, config: AcesoConfig, target: int, changed: AcesoStage
    ) -> AcesoConfig | None:
        """Change the target's GPUs, and those of other stages so that the total stays."""
        if not self._is_possible(changed, config):
            return None
        grows = changed.gpus > config.stages[target].gpus
        givers, takers = self._sort_others(config, target)
        for index, counterpart in (givers if grows else takers)[: len(config.stages) - 1]:
            stages = {target: changed, index: counterpart}
            stages, spare = self._balance_gpus(config, stages, givers, takers)
            if spare:
                continue
            result = replace(
                config, stages=tuple(stages.get(i, stage) for i, stage in enumerate(config.stages))
            )
            if self._keeps_nodes(result):
                return result
        return None

    def _sort_others(
        self, config: AcesoConfig, target: int
    ) -> tuple[list[tuple[int, AcesoStage]], list[tuple[int, AcesoStage]]]:
        """Other stages with half the GPUs, least time first, and with twice, most time first."""
        halves: list[tuple[float, int, AcesoStage]] = []
        doubles: list[tuple[float, int, AcesoStage]] = []
        for index, stage in enumerate(config.stages):
            if index == target:
                continue
            key = (stage, config.micro_batch, len(config.stages))
            if key not in self._resizings:
                self._resizings[key] = (
                    self._find_best_way(stage, _halve, config),
                    self._find_best_way(stage, _double, config),
                )
            for found, best in zip((halves, doubles), self._resizings[key], strict=True):
                if best is not None:
                    found.append((best[0], index, best[1]))
        halves.sort(key=lambda one: one[:2])
        doubles.sort(key=lambda one: (-one[0], one[1]))
        return [one[1:] for one in halves], [one[1:] for one in doubles]

    def _find_best_way(
        self,
        stage: AcesoStage,
        change: Callable[[AcesoStage, str], AcesoStage | None],
        config: AcesoConfig,
    ) -> _Way | None:
        """The quickest of the ways to change a stage's GPUs."""
        ways = [way for way in (change(stage, "tp"), change(stage, "dp")) if way]
        return min(
            (
                (self.model.predicted_ms(way, config.micro_batch), way)
                for way in ways
                if self._is_possible(way, config)
            ),
            default=None,
        )

    def _balance_gpus(
        self,
        config: AcesoConfig,
        stages: dict[int, AcesoStage],
        givers: list[tuple[int, AcesoStage]],
        takers: list[tuple[int, AcesoStage]],
    ) -> tuple[dict[int, AcesoStage], int]:
        """Let further stages give the missing GPUs, then others take the remaining ones.

        Also returns the number of spare GPUs, negative if some are missing.
        """
        stages = dict(stages)
        spare = sum(config.stages[index].gpus - stage.gpus for index, stage in stages.items())
        for index, stage in givers:
            if spare < 0 and index not in stages:
                stages[index] = stage
                spare += config.stages[index].gpus - stage.gpus
        for index, stage in takers:
            wanted = stage.gpus - config.stages[index].gpus
            if wanted <= spare and index not in stages:
                stages[index] = stage
                spare -= wanted
        return stages, spare

    def _is_possible(self, stage: AcesoStage, config: AcesoConfig) -> bool:
        inputs = self.model.inputs
        return (
            stage.t <= inputs.tp_max
            and stage.gpus <= inputs.gpus - (len(config.stages) - 1)
            and (stage.gpus <= SIZES_MAX or self.model.repairs.any_size)
            and self.model.key(stage, config.micro_batch) is not None
        )

    def _keeps_nodes(self, config: AcesoConfig) -> bool:
        """Whether no stage spans nodes, unless it has whole nodes."""
        node = self.model.inputs.gpus_per_node
        ends = list(accumulate((stage.gpus for stage in config.stages), initial=0))
        return all(
            end <= (first // node + 1) * node or (first % node == 0 and end % node == 0)
            for first, end in pairwise(ends)
        )

    # -- micro batches ----------------------------------------------------------------------------

    def _resize_micro_batch(self, config: AcesoConfig, *, grow: bool) -> AcesoConfig | None:
        """The next micro batch size, with new degrees for every stage."""
        sizes = self.model.inputs.micro_batches
        position = sizes.index(config.micro_batch) + (1 if grow else -1)
        if not 0 <= position < len(sizes):
            return None
        stages = []
        for index, stage in enumerate(config.stages):
            behind = len(config.stages) - 1 - index
            ways = [
                (self._price(way, sizes[position], behind), way)
                for way in _degrees(stage, self.model.inputs.tp_max)
                if self.model.key(way, sizes[position]) is not None
            ]
            if not ways:
                return None
            stages.append(min(ways)[1])
        return AcesoConfig(sizes[position], tuple(stages))

    def _price(self, stage: AcesoStage, micro_batch: int, behind: int) -> float:
        price = self.model.predicted_ms(stage, micro_batch) * stage.gpus
        memory = self.model.memory_mb(stage, micro_batch, behind=behind)
        return price + (10 * memory if memory > self.model.inputs.memory_mb else 0.0)


def _degrees(stage: AcesoStage, tp_max: int) -> Iterator[AcesoStage]:
    t = 1
    while t <= tp_max and stage.gpus % t == 0:
        yield stage._replace(t=t, d=stage.gpus // t)
        t *= 2


def _double(stage: AcesoStage, what: str) -> AcesoStage:
    return stage._replace(t=2 * stage.t) if what == "tp" else stage._replace(d=2 * stage.d)


def _halve(stage: AcesoStage, what: str) -> AcesoStage | None:
    if (stage.t if what == "tp" else stage.d) % 2:
        return None
    return stage._replace(t=stage.t // 2) if what == "tp" else stage._replace(d=stage.d // 2)
