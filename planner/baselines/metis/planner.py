"""Metis: unequal device groups of mixed GPU kinds, balanced by profiled speed and memory.

It enumerates orders of the GPU kinds, device groups and numbers of micro batches, starts each with
data parallelism only and turns it into TP where memory is tight (Um, Byun, Lee, Hwang, USENIX ATC
2024). It supports all kinds of a cluster, with one bandwidth within and one between machines for
each machine. ``published`` keeps the defects listed in ``MetisRepairs``; both modes count the
elements sent over a boundary as if they were bytes (quirk, kept).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations

from planner.baselines.metis.adapter import inputs_from, to_plan
from planner.baselines.metis.balancer import adapt_capacities, balance_layers
from planner.baselines.metis.cost import (
    FIXED,
    PUBLISHED,
    MetisInputs,
    MetisPlan,
    MetisRepairs,
    MetisStrategy,
    Ranks,
    group_ms,
    plan_ms,
    stage_mb,
)
from planner.baselines.metis.groups import device_groups
from planner.baselines.shared import equal_gpus, proposals
from planner.compare.interface import Case, Mode, ProposedPlan

ATTEMPTS_MAX = 3
"""Layer partitions tried per strategy before memory counts as too small."""


# Search ----------------------------------------------------------------------------------------


def search(
    inputs: MetisInputs, *, repairs: MetisRepairs = FIXED, groups_max: int | None = None
) -> list[MetisPlan]:
    """All plans that have a cost, fastest first.

    ``groups_max`` bounds the device groups tried per order of kinds and number of stages.
    """
    found = []
    for plan in candidates(inputs, repairs=repairs, groups_max=groups_max):
        ms = plan_ms(inputs, plan, repairs=repairs)
        if ms is not None:
            found.append(replace(plan, ms=ms))
    return sorted(found, key=lambda plan: plan.ms)


def candidates(
    inputs: MetisInputs, *, repairs: MetisRepairs = FIXED, groups_max: int | None = None
) -> Iterator[MetisPlan]:
    """Order of kinds outermost, then number of stages, groups, numbers of micro batches."""
    gpus = sum(node.gpus for node in inputs.nodes)
    counts = [n for n in range(inputs.batch, 0, -1) if inputs.batch % n == 0]
    # By name; the public program takes the kinds as a hash set gives them.
    orders = permutations(sorted({node.kind for node in inputs.nodes}))
    for number, kinds in enumerate(orders):
        for stages in range(1, min(gpus, inputs.layers) + 1):
            switched = not repairs.stage_count and number > 0 and stages == 1 and gpus > 1
            all_groups = device_groups(
                2 if switched else stages,
                gpus=gpus,
                variance=inputs.variance,
                permuted_max=inputs.permuted_max,
            )
            for groups in islice(all_groups, groups_max):
                for batches in counts:
                    for plan in strategies(inputs, kinds, groups, batches, repairs=repairs):
                        yield replace(plan, stages_costed=1) if switched else plan


def strategies(
    inputs: MetisInputs,
    kinds: tuple[str, ...],
    groups: tuple[int, ...],
    batches: int,
    *,
    repairs: MetisRepairs = FIXED,
) -> Iterator[MetisPlan]:
    """Degrees inside the stages, from all data towards all tensor parallel, that fit in memory."""
    ranks = Ranks(inputs, kinds, groups)
    chosen: list[MetisStrategy] = [(group, 1) for group in groups]
    room: list[float] | None = None
    while True:
        samples = [inputs.batch // d // batches for d, _ in chosen]
        if all(
            0 < b <= inputs.samples_max and t <= inputs.tp_max
            for b, (_, t) in zip(samples, chosen, strict=True)
        ):
            cuts = room = None
            with contextlib.suppress(KeyError):  # The profile lacks these ranks or samples.
                cuts, room, attempts = partition(inputs, ranks, chosen, batches, repairs=repairs)
            whole = cuts is not None and cuts[-1] == inputs.layers
            if cuts is not None and (whole or not repairs.whole_layers):
                yield MetisPlan(kinds, groups, tuple(chosen), batches, cuts, len(groups), attempts)
                if attempts == 1 and not repairs.goes_on:
                    return
        score = room or [1 / d for d, _ in chosen]
        open_stages = [stage for stage, (d, _) in enumerate(chosen) if d != 1]
        if not open_stages:
            return
        tightest = min(open_stages, key=lambda stage: score[stage])
        d, t = chosen[tightest]
        chosen[tightest] = (d // 2, 2 * t)


def partition(
    inputs: MetisInputs,
    ranks: Ranks,
    chosen: Sequence[MetisStrategy],
    batches: int,
    *,
    repairs: MetisRepairs = FIXED,
) -> tuple[tuple[int, ...] | None, list[float] | None, int]:
    """Cuts that balance speed and fit in memory, the memory left over, the attempts made.

    Raises ``KeyError`` where the profile lacks a number of ranks or samples.
    """
    everything = (0, inputs.layers)
    speeds = [
        1 / group_ms(inputs, ranks.kinds(s), strategy, batches=batches, layers=everything)
        for s, strategy in enumerate(chosen)
    ]
    capacities = [speed / sum(speeds) for speed in speeds]
    kind = next(kind for kind, t, b in inputs.layer_ms if (t, b) == (1, 1))
    row = inputs.layer_ms[kind, 1, 1]
    demands = [ms / sum(row) for ms in row]
    for attempt in range(1, ATTEMPTS_MAX + 1):
        cuts = balance_layers(capacities, demands)
        judged = [
            stage_mb(inputs, ranks, s, chosen[s], batches, layers, repairs=repairs)
            for s, layers in enumerate(pairwise(cuts))
        ]
        memory, demand = [m for m, _ in judged], [d for _, d in judged]
        room = [m - d for m, d in judged]
        if all(left > 0 for left in room):
            return cuts, room, attempt
        adapted = adapt_capacities(capacities, memory_mb=memory, demand_mb=demand)
        if adapted is None:
            break
        capacities = adapted
    return None, None, ATTEMPTS_MAX


@dataclass(frozen=True, slots=True)
class MetisPlanner:
    """Metis on all GPU kinds of a cluster at once."""

    groups_max: int = 16
    """Device groups tried per order of kinds and number of stages, in place of a time limit."""
    name: str = "metis"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The plans for all orders of the GPU kinds, best first by Metis' estimate."""
        kinds = equal_gpus.fleets_of(case)
        if not kinds:
            return []
        inputs = inputs_from(case, kinds, mode=mode)
        # The layers' times include everything here, so a sync time of 0 is not a missing one.
        repairs = FIXED if mode == "fixed" else replace(PUBLISHED, zero_sync=True)
        gpus = sum(fleet.gpus for fleet in kinds)
        return proposals.ranked(
            (gpus, proposals.proposal(own.ms / 1e3, to_plan(own, inputs, case.job, kinds)))
            for own in search(inputs, repairs=repairs, groups_max=self.groups_max)
        )
