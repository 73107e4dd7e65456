"""Aceso: a search that relieves the bottleneck of a configuration, one action after another.

For each number of stages it starts from an even configuration and tries the actions that take from
the slowest stage (or the fullest) what it has too much of; where one action does not help, a few in
a row may (Liu, Li, Zhang, et al., EuroSys 2024). It knows equal GPUs and two bandwidths, so it runs
once per GPU kind. Recomputation is not chosen, as in the public comparison.

``published`` keeps what ``AcesoRepairs`` lists. Both modes keep these quirks: actions expect all
links to be within a node and compare times with messages to goals without, so that a stage with a
large output hardly ever gives operators to its neighbours. The published limits in seconds are
limits on the numbers of trials, hops and configurations here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.baselines.aceso.actions import ACTIONS, AcesoActions
from planner.baselines.aceso.adapter import inputs_from, to_plan
from planner.baselines.aceso.cost import (
    FIXED,
    PUBLISHED,
    AcesoConfig,
    AcesoInputs,
    AcesoJudged,
    AcesoModel,
    AcesoPlan,
    AcesoRepairs,
    AcesoStage,
)
from planner.baselines.shared import equal_gpus, proposals
from planner.compare.interface import Case, Mode, ProposedPlan

PROMISING = 1.2
"""A configuration stays open if it is slower than the best by at most this factor."""
RETURNS_MAX = 5
"""Times that the search comes back to an explored configuration when nothing else is left."""


def initial(
    inputs: AcesoInputs, stages: int, *, repairs: AcesoRepairs = FIXED
) -> AcesoConfig | None:
    """Operators in equal numbers, GPUs doubled in turns, TP as wide as the job allows.

    The last stage also takes the operators that remain. ``None`` if there is no such start.
    """
    most = inputs.gpus if repairs.all_gpus else inputs.tp_max
    gpus = [1] * stages
    if stages > min(inputs.gpus, inputs.operators):
        return None
    grown = True
    while grown:
        grown = False
        for stage in range(stages):
            if 2 * gpus[stage] <= most and sum(gpus) + gpus[stage] <= inputs.gpus:
                gpus[stage] *= 2
                grown = True
    each = inputs.operators // stages
    ends = [each * stage for stage in range(stages)] + [inputs.operators]
    degrees = [min(count, inputs.tp_max) for count in gpus]
    parts = tuple(
        AcesoStage(ends[i], ends[i + 1], degrees[i], gpus[i] // degrees[i]) for i in range(stages)
    )
    model = AcesoModel(inputs, repairs)
    for size in inputs.micro_batches:
        if all(model.key(stage, size) is not None for stage in parts):
            return AcesoConfig(size, parts)
    return None


def action_groups(judged: AcesoJudged, target: int) -> list[list[str]]:
    """Actions by what the target has too much of, the likeliest to help first."""
    if not judged.fits:
        return [[action for action, (_, memory, _) in ACTIONS.items() if memory < 0]]
    ideal, loss = judged.ideal_ms, judged.loss_ms
    much_ideal = ideal[target] > sum(ideal) / len(ideal)
    much_loss = loss[target] > sum(loss) / len(loss)

    def faster(*, only: bool = False) -> list[str]:
        return [a for a, (t, _, c) in ACTIONS.items() if t < 0 and not (only and c > 0)]

    def quieter(*, only: bool = False) -> list[str]:
        return [a for a, (t, _, c) in ACTIONS.items() if c < 0 and not (only and t > 0)]

    by_share = [
        (_share(ideal, target), [faster(only=much_loss), faster()]),
        (_share(loss, target), [quieter(only=much_ideal), quieter()]),
        # Nothing is recomputed: its share is 0, so actions that save memory come last.
        (0.0, [[a for a, (_, memory, _) in ACTIONS.items() if memory < 0]]),
    ]
    by_share.sort(key=lambda one: -one[0])
    wanted = [group for _, groups in by_share for group in groups] + [list(ACTIONS)]
    seen: set[str] = set()
    found = []
    for group in wanted:
        fresh = [action for action in group if action not in seen]
        seen.update(fresh)
        if fresh:
            found.append(fresh)
    return found


def _share(values: list[float], target: int) -> float:
    total = sum(values)
    return values[target] / total if total else 0.0


@dataclass(slots=True)
class AcesoSearch:
    """The search for one number of stages."""

    model: AcesoModel
    hops_max: int
    trials_max: int
    configurations_max: int | None = None
    actions: AcesoActions = field(init=False)
    best_ms: float = math.inf
    seen: dict[AcesoConfig, None] = field(default_factory=dict)
    expanded: set[AcesoConfig] = field(default_factory=set)
    unexplored: dict[AcesoConfig, None] = field(default_factory=dict)
    explored: dict[AcesoConfig, int] = field(default_factory=dict)
    """Configurations that were expanded, and how often the search came back to them."""
    visited: set[tuple[AcesoConfig, int]] = field(default_factory=set)
    """Configurations with the targets that were relieved in them."""

    def __post_init__(self) -> None:
        self.actions = AcesoActions(self.model)

    def run(self, start: AcesoConfig) -> AcesoConfig:
        """The best configuration found in the trials."""
        self._see(start)
        config: AcesoConfig | None = start
        again = False
        for _ in range(self.trials_max):
            assert config is not None, "the loop ends where there is no configuration"
            improved = self._trial(config, again=again)
            config, again = improved, False
            if config is None:
                config, again = self._resume()
            if config is None or self._is_spent():
                break
        return self._choose_best(self.seen)

    def _trial(self, config: AcesoConfig, *, again: bool) -> AcesoConfig | None:
        """Relieve one target after another until something gets better."""
        judged = self.model.judge(config)
        for _ in config.stages:
            improved = self._hop(config, 0, self.best_ms, again=again)
            if improved is not None:
                return improved
            if not judged.fits:
                # Above the memory limit, needing less memory counts as an improvement.
                smallest = self._choose_best(self.seen)
                if max(self.model.judge(smallest).memory_mb) < max(judged.memory_mb):
                    return smallest
        return None

    def _hop(
        self, config: AcesoConfig, depth: int, goal_ms: float, *, again: bool
    ) -> AcesoConfig | None:
        """Apply groups of actions, several in a row if needed, until one beats the goal."""
        if depth == self.hops_max or self._is_spent():
            return None
        self.expanded.add(config)
        self.unexplored.pop(config, None)
        self.explored.setdefault(config, 0)
        judged = self.model.judge(config)
        target = self._target(judged, again=again)
        if target is None:
            return None
        for group in action_groups(judged, target):
            results = []
            for action in group:
                result = self.actions.apply(action, config, target)
                if result is not None and result not in self.expanded:
                    results.append(result)
                    self._see(result)
            fitting = [one for one in results if self.model.judge(one).fits]
            if fitting:
                best = self._choose_best(fitting)
                if self.model.judge(best).ms < goal_ms:
                    return best
            for result in sorted(results, key=lambda one: (self.model.judge(one).ms, one)):
                improved = self._hop(result, depth + 1, goal_ms, again=False)
                if improved is not None:
                    return improved
        return None

    def _is_spent(self) -> bool:
        return self.configurations_max is not None and len(self.seen) >= self.configurations_max

    def _target(self, judged: AcesoJudged, *, again: bool) -> int | None:
        """The worst stage that was not a target here before."""
        config = judged.config
        score = judged.times_ms if judged.fits else judged.memory_mb
        open_stages = [
            stage
            for stage in range(len(config.stages))
            if again or (config, stage) not in self.visited
        ]
        if not open_stages:
            return None
        target = max(open_stages, key=lambda stage: (score[stage], -stage))
        self.visited.add((config, target))
        return target

    def _see(self, config: AcesoConfig) -> None:
        judged = self.model.judge(config)
        self.seen[config] = None
        if judged.fits:
            self.best_ms = min(self.best_ms, judged.ms)
        if judged.ms < PROMISING * self.best_ms and config not in self.expanded:
            self.unexplored[config] = None

    def _resume(self) -> tuple[AcesoConfig | None, bool]:
        """The most promising open configuration, or else an old one to explore again."""
        if self.unexplored:
            config = self._choose_best(self.unexplored)
            del self.unexplored[config]
            return config, False
        old = [config for config, returns in self.explored.items() if returns < RETURNS_MAX]
        if not old:
            return None, False
        config = self._choose_best(old)
        self.explored[config] += 1
        return config, True

    def _choose_best(self, configs: Iterable[AcesoConfig]) -> AcesoConfig:
        """The fastest that fits, else the one that needs least memory."""

        def score(config: AcesoConfig) -> tuple[bool, float, AcesoConfig]:
            judged = self.model.judge(config)
            return not judged.fits, judged.ms if judged.fits else max(judged.memory_mb), config

        return min(configs, key=score)


def search(
    inputs: AcesoInputs,
    stage_counts: Iterable[int],
    *,
    repairs: AcesoRepairs = FIXED,
    hops_max: int = 3,
    trials_max: int = 30,
    configurations_max: int | None = None,
) -> list[AcesoPlan]:
    """The best plan of each number of stages that fits in memory, the fastest first."""
    found = []
    for stages in stage_counts:
        start = initial(inputs, stages, repairs=repairs)
        if start is None:
            continue
        model = AcesoModel(inputs, repairs)
        config = AcesoSearch(model, hops_max, trials_max, configurations_max).run(start)
        judged = model.judge(config)
        if judged.fits:
            found.append(AcesoPlan(judged.ms, config))
    return sorted(found, key=lambda plan: (plan.ms, plan.config.gpus, plan.config))


@dataclass(frozen=True, slots=True)
class AcesoPlanner:
    """Aceso, run once per GPU kind."""

    hops_max: int = 3
    trials_max: int = 30
    configurations_max: int = 400
    """Judged for each number of stages; with the hops and trials in place of a time limit."""
    name: str = "aceso"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The best plan for every number of stages and GPU kind, best first by its estimate."""
        found = []
        for fleet in equal_gpus.fleets_of(case):
            inputs = inputs_from(case, fleet, mode=mode)
            plans = search(
                inputs,
                range(1, min(inputs.gpus, inputs.operators) + 1),
                repairs=FIXED if mode == "fixed" else PUBLISHED,
                hops_max=self.hops_max,
                trials_max=self.trials_max,
                configurations_max=self.configurations_max,
            )
            found += [
                (own.config.gpus, proposals.proposal(own.ms / 1e3, to_plan(own, case.job, fleet)))
                for own in plans
            ]
        return proposals.ranked(found)
