"""Why this plan: its bottleneck, binding limits, rejected families, and idle GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.paper_search.formula_tables import PaperModel, micro_batch_counts
from planner.paper_search.polish import JudgedShape
from planner.paper_search.search import PaperResult, PaperSearch
from planner.pipelines.plan_shape import PlanShape
from planner.problem.inventory import Lot, groups_by_lot
from planner.problem.objective import Limits
from planner.problem.question import Idle, Rejected, Why
from planner.search.local_search import EventSearch, JudgedPlan
from simulator.estimate.result import Estimate
from simulator.spec.job import Objective
from simulator.spec.plan import Plan

REJECTED_MAX = 12
_NEAR = 0.03
"""A limit counts as binding if the plan comes this close to it."""


def explain_paper(
    model: PaperModel, limits: Limits, result: PaperResult
) -> tuple[tuple[Rejected, ...], Why]:
    """Rejected families and reasons, for the search under the paper's formula."""
    best = result.best
    assert best is not None
    families: dict[str, JudgedShape] = {}
    for found in result.found:
        name = _family(model, found.shape)
        if name not in families or found.worth < families[name].worth:
            families[name] = found
    families.pop(_family(model, best.shape), None)
    rejected = tuple(
        Rejected(name, found.verdict.seconds, found.verdict.usd, found.worth[0] / best.worth[0] - 1)
        for name, found in sorted(families.items(), key=lambda item: item[1].worth)[:REJECTED_MAX]
    )
    shape, verdict = best.shape, best.verdict
    slowest = max(range(shape.stages), key=lambda s: (verdict.levels[s], -s))
    most, _ = micro_batch_counts(model.global_batch // shape.micro_batch, shape.replicas)
    column = shape.columns[slowest]
    devices = ", ".join(f"{n} x {model.lots[lot].gpu} TP {tp}" for lot, tp, n in column)
    share = (most - 1) * verdict.levels[slowest] / verdict.seconds
    used = PaperSearch.used(shape)
    richer = [(PaperSearch.used(f.shape), f.worth[0] / best.worth[0] - 1) for f in result.found]
    why = [
        f"bottleneck: stage {slowest} (layers {shape.cuts[slowest]}-{shape.cuts[slowest + 1] - 1}, "
        f"{devices}) takes {verdict.levels[slowest]:.4g} s per micro batch, {share:.0%} of the "
        f"iteration; gradient sync {verdict.sync_s / verdict.seconds:.0%}",
        *_binding(limits, verdict.seconds, verdict.usd),
    ]
    return rejected, Why(tuple(why), tuple(_idle(model.lots, used, richer)))


def explain_event(search: EventSearch, best: JudgedPlan) -> tuple[tuple[Rejected, ...], Why]:
    """Rejected families and reasons, for the search under the event estimator."""
    families: dict[str, JudgedPlan] = {}
    for judged in search.judged:
        name = _mix_family(search.lots, judged)
        if name not in families or judged.worth < families[name].worth:
            families[name] = judged
    families.pop(_mix_family(search.lots, best), None)
    rejected = tuple(
        Rejected(
            name,
            judged.estimate.iteration_s,
            judged.estimate.money.total_usd,
            judged.worth[0] / best.worth[0] - 1,
        )
        for name, judged in sorted(families.items(), key=lambda item: item[1].worth)[:REJECTED_MAX]
    )
    richer = [(_used(search.lots, j.plan), j.worth[0] / best.worth[0] - 1) for j in search.judged]
    estimate: Estimate = best.estimate
    why = [
        f"bottleneck: {estimate.bottleneck}",
        *_binding(search.limits, estimate.iteration_s, estimate.money.total_usd),
    ]
    idle = _idle(search.lots, _used(search.lots, best.plan), richer)
    return rejected, Why(tuple(why), tuple(idle))


def _family(model: PaperModel, shape: PlanShape) -> str:
    kinds = sorted({model.lots[lot].gpu for column in shape.columns for lot, _, _ in column})
    return f"{' + '.join(kinds)}, {shape.stages} stages, micro batch {shape.micro_batch}"


def _mix_family(lots: Sequence[Lot], judged: JudgedPlan) -> str:
    kinds = sorted({lots[x.lot].gpu for t in judged.mix.templates for x in t.steps})
    stages = sorted({len(t.steps) for t in judged.mix.templates})
    size = judged.mix.templates[0].micro_batch
    return f"{' + '.join(kinds)}, {'/'.join(map(str, stages))} stages, micro batch {size}"


def _used(lots: Sequence[Lot], plan: Plan) -> dict[int, int]:
    index = {(lot.gpu, lot.machine, lot.zone): k for k, lot in enumerate(lots)}
    return {
        index[key]: sum(tp * n for tp, n in groups.items())
        for key, groups in groups_by_lot(plan).items()
    }


def _binding(limits: Limits, seconds: float, usd: float | None) -> Iterable[str]:
    """Limits that the plan comes close to; raising them would allow a better plan."""
    o: Objective = limits.objective
    if usd is not None:
        hourly = usd / seconds * 3600
        for name, value, allowed in (
            ("max_usd_per_iteration", usd, o.max_usd_per_iteration),
            ("max_usd_per_hour", hourly, o.max_usd_per_hour),
            ("max_usd_total", usd * (limits.steps or 0), o.max_usd_total),
        ):
            if allowed and value > allowed * (1 - _NEAR):
                yield f"binding: {name} = {allowed:g}, and the plan takes {value:.4g}"
    if limits.seconds_max is not None and seconds > limits.seconds_max * (1 - _NEAR):
        yield f"binding: an iteration may take {limits.seconds_max:.4g} s, and takes {seconds:.4g}"


def _idle(
    lots: Sequence[Lot], used: dict[int, int], others: Sequence[tuple[dict[int, int], float]]
) -> Iterable[Idle]:
    """Idle GPUs, and how much worse the best judged plan with more of them is."""
    for index, lot in enumerate(lots):
        idle = lot.gpus - used.get(index, 0)
        if idle:
            with_more = [
                loses for taken, loses in others if taken.get(index, 0) > used.get(index, 0)
            ]
            yield Idle(lot.gpu, lot.zone, idle, lot.gpus, min(with_more, default=None))
