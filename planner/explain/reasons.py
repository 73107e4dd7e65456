"""Why this plan: its bottleneck, binding limits, rejected families, and idle GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from planner.paper_search.formula_tables import PaperModel, micro_batch_counts
from planner.paper_search.search import PaperResult, PaperSearch
from planner.paper_search.shape_improver import JudgedShape
from planner.pipelines.plan_shape import PlanShape
from planner.problem.inventory import Lot, gpus_by_lot
from planner.problem.objective import Limits
from planner.problem.preference import error_between
from planner.problem.question import AnswerReasons, IdleGpus, Rejected
from planner.search.local_search import EventSearch, JudgedPlan

REJECTED_MAX = 12
_NEAR = 0.03
"""A limit counts as binding if the plan comes this close to it."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the reasons need to know of a judged plan."""

    family: str
    score: tuple[float, ...]
    seconds: float
    usd: float | None
    used: dict[int, int]
    """GPUs by lot."""
    judged: JudgedPlan | None = None
    """The plan, where the error bars of differences are known."""


def explain_paper(
    model: PaperModel, limits: Limits, result: PaperResult
) -> tuple[tuple[Rejected, ...], AnswerReasons]:
    """Rejected families and reasons, for the search under the paper's formula."""
    assert result.best is not None
    shape, verdict = result.best.shape, result.best.verdict
    slowest = max(range(shape.stages), key=lambda s: (verdict.levels[s], -s))
    most, _ = micro_batch_counts(model.global_batch // shape.micro_batch, shape.replicas)
    column = shape.columns[slowest]
    devices = ", ".join(f"{n} x {model.lots[lot].gpu} TP {tp}" for lot, tp, n in column)
    share = (most - 1) * verdict.levels[slowest] / verdict.seconds
    bottleneck = (
        f"stage {slowest} (layers {shape.cuts[slowest]}-{shape.cuts[slowest + 1] - 1}, "
        f"{devices}) takes {verdict.levels[slowest]:.4g} s per micro batch, {share:.0%} of the "
        f"iteration; gradient sync {verdict.sync_s / verdict.seconds:.0%}"
    )

    def judged(one: JudgedShape) -> _Judged:
        used = PaperSearch.used(one.shape)
        name = _family(model, one.shape)
        return _Judged(name, one.score, one.verdict.seconds, one.verdict.usd, used)

    return _explain(
        model.lots, limits, [judged(one) for one in result.found], judged(result.best), bottleneck
    )


def explain_event(
    search: EventSearch, best: JudgedPlan
) -> tuple[tuple[Rejected, ...], AnswerReasons]:
    """Rejected families and reasons, for the search under the event estimator."""

    def judged(one: JudgedPlan) -> _Judged:
        estimate, used = one.estimate, gpus_by_lot(one.plan, search.lots)
        name = _mix_family(search.lots, one)
        return _Judged(name, one.score, estimate.iteration_s, estimate.money.total_usd, used, one)

    found = [judged(one) for one in search.judged]
    return _explain(search.lots, search.limits, found, judged(best), best.estimate.bottleneck)


def _explain(
    lots: Sequence[Lot], limits: Limits, found: Sequence[_Judged], best: _Judged, bottleneck: str
) -> tuple[tuple[Rejected, ...], AnswerReasons]:
    families: dict[str, _Judged] = {}
    for one in found:
        if one.family not in families or one.score < families[one.family].score:
            families[one.family] = one
    families.pop(best.family, None)

    def loses(one: _Judged) -> float | None:
        # Where the best plan costs nothing, no share says how much worse another is.
        return one.score[0] / best.score[0] - 1 if best.score[0] > 0 else None

    def error(one: _Judged) -> float | None:
        if one.judged is None or best.judged is None:
            return None
        return error_between(one.judged, best.judged)

    rejected = tuple(
        Rejected(one.family, one.seconds, one.usd, loses(one), error(one))
        for one in sorted(families.values(), key=lambda one: one.score)[:REJECTED_MAX]
    )
    sentences = (f"bottleneck: {bottleneck}", *_binding(limits, best.seconds, best.usd))
    idle = []
    for k, lot in enumerate(lots):
        if lot.gpus > best.used.get(k, 0):
            more = (loses(one) for one in found if one.used.get(k, 0) > best.used.get(k, 0))
            least = min((share for share in more if share is not None), default=None)
            idle.append(
                IdleGpus(lot.gpu, lot.zone, lot.gpus - best.used.get(k, 0), lot.gpus, least)
            )
    return rejected, AnswerReasons(sentences, tuple(idle))


def _family(model: PaperModel, shape: PlanShape) -> str:
    kinds = sorted({model.lots[lot].gpu for column in shape.columns for lot, _, _ in column})
    tps = {tp for column in shape.columns for _, tp, _ in column}
    return f"{' + '.join(kinds)}{_tp(tps)}, {shape.stages} stages, micro batch {shape.micro_batch}"


def _mix_family(lots: Sequence[Lot], judged: JudgedPlan) -> str:
    kinds = sorted({lots[x.lot].gpu for t in judged.mix.templates for x in t.stages})
    stages = sorted({len(t.stages) for t in judged.mix.templates})
    size = "/".join(map(str, judged.plan.sizes))
    tp = _tp({x.tp for t in judged.mix.templates for x in t.stages})
    chunks = judged.plan.virtual_stages
    more = "" if chunks == 1 else f" of {chunks} chunks"
    more += ", zero-bubble" if judged.plan.schedule == "zero-bubble" else ""
    more += ", offload" if judged.plan.offloads else ""
    more += "" if judged.plan.outer_every is None else ", outer steps"
    return f"{' + '.join(kinds)}{tp}, {'/'.join(map(str, stages))} stages{more}, micro batch {size}"


def _tp(degrees: Collection[int]) -> str:
    """Return the TP degrees of a family, unless there is no TP."""
    return "" if max(degrees) == 1 else f", TP {'/'.join(map(str, sorted(degrees)))}"


def _binding(limits: Limits, seconds: float, usd: float | None) -> Iterable[str]:
    """Limits that the plan comes close to; raising them would allow a better plan."""
    if usd is not None:
        for name, value, allowed in limits.money(seconds, usd):
            if allowed and value > allowed * (1 - _NEAR):
                yield f"binding: {name} = {allowed:g}, and the plan takes {value:.4g}"
    if limits.seconds_max is not None and seconds > limits.seconds_max * (1 - _NEAR):
        yield f"binding: an iteration may take {limits.seconds_max:.4g} s, and takes {seconds:.4g}"
