"""Explains why a plan does not fit in memory: which devices, by how much, and what would help."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from simulator.documents.fields import quote
from simulator.estimate.result import DeviceMemory
from simulator.hardware.types import GIB
from simulator.spec.plan import Plan, Stage, with_sizes

MemoryOf = Callable[[Plan], tuple[tuple[DeviceMemory, ...], ...]]


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """A device group that needs more memory than its devices have."""

    pipelines: tuple[int, ...]
    """All pipelines whose equal stage lacks memory."""
    stage: int
    gpu: str
    zone: str
    needed_bytes: float
    capacity_bytes: float
    cures: tuple[str, ...]

    def __str__(self) -> str:
        some, more = self.pipelines[:8], len(self.pipelines) - 8
        which = f"pipeline{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
        which += f" and {more} more" if more > 0 else ""
        over = (self.needed_bytes - self.capacity_bytes) / GIB
        cure = "no change of this stage alone makes it fit; use other devices"
        if self.cures:
            cure = f"it would fit {', or '.join(self.cures)}"
        return (
            f"{which} stage {self.stage} ({self.gpu} in {self.zone}) needs "
            f"{self.needed_bytes / GIB:.1f} GiB per device, {over:.1f} GiB more than the "
            f"{self.capacity_bytes / GIB:.1f} GiB there are; {cure}"
        )


def memory_shortages(
    plan: Plan, memory_of: MemoryOf, *, wider_tp: Callable[[Stage], Sequence[int]]
) -> tuple[MemoryShortage, ...]:
    """Return the device groups that lack memory, equal ones once, with cures that work.

    ``wider_tp`` gives the larger TP degrees that a stage may have.
    """
    rows = memory_of(plan)
    groups: dict[tuple[int, Stage, DeviceMemory], list[int]] = {}
    for p, row in enumerate(rows):
        for s, device in enumerate(row):
            if not device.fits:
                groups.setdefault((s, plan.pipelines[p].stages[s], device), []).append(p)
    return tuple(
        MemoryShortage(
            tuple(pipelines),
            s,
            stage.places[0].gpu,
            stage.places[0].zone,
            device.total,
            device.capacity,
            tuple(_cures(plan, pipelines[0], s, memory_of, wider_tp(stage))),
        )
        for (s, stage, device), pipelines in groups.items()
    )


def _cures(plan: Plan, p: int, s: int, memory_of: MemoryOf, degrees: Sequence[int]) -> list[str]:
    """Return changes of this stage, or of the micro batch size, that make it fit."""
    stage = plan.pipelines[p].stages[s]

    def fits(changed: Plan) -> bool:
        return memory_of(changed)[p][s].fits

    def stage_fits(other: Stage) -> bool:
        return fits(_replace_stage(plan, p, s, other))

    found = [*_recomputation(stage, stage_fits)]
    found += _smaller_micro_batch(plan, p, stage, fits)
    wider = next((tp for tp in degrees if stage_fits(replace(stage, tp=tp))), None)
    if wider is not None:
        found.append(f"with TP {wider}")
    found += _fewer_layers(plan, p, s, fits)
    if not found and degrees and stage_fits(replace(stage, tp=degrees[-1], recompute="full")):
        found.append(f'with TP {degrees[-1]} and "recompute": "full" together')
    return found


def _recomputation(stage: Stage, fits: Callable[[Stage], bool]) -> Iterator[str]:
    """Recompute as few layers as make it fit."""
    layers = stage.layers[1] - stage.layers[0]
    if stage.recompute == "full" or not fits(replace(stage, recompute="full")):
        return
    more = range(stage.recomputed + 1, layers)
    fewest = bisect_left(more, True, key=lambda n: fits(replace(stage, recompute=n)))
    yield f'with "recompute": {quote(more[fewest] if fewest < len(more) else "full")}'


def _smaller_micro_batch(
    plan: Plan, p: int, stage: Stage, fits: Callable[[Plan], bool]
) -> Iterator[str]:
    whole = size = plan.size_of(plan.pipelines[p])
    while len(stage.places) == 1 and size % 2 == 0:
        size //= 2
        # All pipelines of this size change, since they have one size in most plans.
        sizes = [size if each == whole else each for each in plan.size_by_pipeline]
        pipelines = tuple(
            replace(each, micro_batches=plan.samples_of(each) // its)
            for each, its in zip(plan.pipelines, sizes, strict=True)
        )
        if fits(with_sizes(replace(plan, pipelines=pipelines), sizes)):
            count = pipelines[p].micro_batches
            yield f"with micro batches of {size} (and {count} of them in this pipeline)"
            return


def _fewer_layers(plan: Plan, p: int, s: int, fits: Callable[[Plan], bool]) -> Iterator[str]:
    stages = plan.pipelines[p].stages
    if len(stages) == 1:
        return  # No other stage can take its layers.
    stage = stages[s]
    first, end = stage.layers
    for count in range(end - first - 1, 0, -1):
        # Remove layers at the end next to another stage.
        shorter = (first, first + count) if s < len(stages) - 1 else (end - count, end)
        if fits(_replace_stage(plan, p, s, replace(stage, layers=shorter))):
            yield f"with {count} layer{'' if count == 1 else 's'} instead of {end - first}"
            return


def _replace_stage(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    """Return the plan with one stage replaced; the other pipelines share its optimizer state."""
    pipeline = plan.pipelines[p]
    stages = (*pipeline.stages[:s], stage, *pipeline.stages[s + 1 :])
    changed = replace(pipeline, stages=stages)
    return replace(plan, pipelines=(*plan.pipelines[:p], changed, *plan.pipelines[p + 1 :]))
