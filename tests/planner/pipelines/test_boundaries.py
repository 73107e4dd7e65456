"""The boundaries of stages, against all boundaries that are possible."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner.pipelines.pipeline_template import TemplateMaker
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import lots_of
from planner.problem.question import Question
from planner.search.search_cache import SearchCache
from simulator.cluster.place_facts import PlaceFacts
from tests.planner.small_cases import random_case

BATCH = 8


def level_s(
    maker: TemplateMaker, stages: tuple[TemplateStage, ...], size: int, cuts: tuple[int, ...]
) -> float:
    """Seconds of the slowest stage; infinite if one does not fit."""
    spent = []
    for s, (stage, first, end) in enumerate(zip(stages, cuts, cuts[1:], strict=False)):
        row = maker._reach(stage, size, min(BATCH, len(stages) - s))[first]
        spent.append(row[end] - row[first])
    return max(spent)


def test_stages_begin_as_early_as_the_slowest_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = same = 0
    late = TemplateMaker._filled_from_end

    def note(
        maker: TemplateMaker,
        stages: tuple[TemplateStage, ...],
        size: int,
        most: int,
        cuts: tuple[int, ...],
    ) -> tuple[int, ...]:
        nonlocal earlier, same
        found = late(maker, stages, size, most, cuts)
        slowest_s = level_s(maker, stages, size, cuts)
        assert level_s(maker, stages, size, found) <= slowest_s * (1 + 1e-9)
        assert all(a <= b for a, b in zip(found, cuts, strict=True))
        as_quick = [
            each
            for inner in itertools.combinations(range(1, cuts[-1]), len(cuts) - 2)
            for each in [(0, *inner, cuts[-1])]
            if level_s(maker, stages, size, each) <= slowest_s
        ]
        earliest = tuple(map(min, zip(*as_quick, strict=True)))
        earlier += found != cuts
        same += found == cuts != earliest
        assert found in (cuts, earliest)
        return found

    monkeypatch.setattr(TemplateMaker, "_filled_from_end", note)
    for seed in range(60):
        rng = random.Random(f"boundaries {seed}")
        case = random_case(rng, gpus_max=12, layers_max=7, batch=BATCH)
        recompute = rng.choice(["none", "auto", "full"])
        job = replace(case.job, recompute=recompute)
        asked = Question(job, case.cluster, case.measurements)
        lots = lots_of(case.cluster, PlaceFacts(case.cluster, case.measurements.network))
        _, maker = SearchCache().event(asked, lots)
        for _ in range(15):
            stages = tuple(
                TemplateStage(rng.randrange(len(lots)), rng.choice([1, 2, 4]), recompute)
                for _ in range(rng.randint(1, len(job.model.layers)))
            )
            maker.template(stages, rng.choice([1, 2, 4]), BATCH)
    # Layers that are very unlike may leave none for a stage between others: these stay.
    assert earlier > 50
    assert same < earlier / 5
