"""How much the planner lets stages recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.problem.question import RECOMPUTING, Answer, Question
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, RecomputePolicy
from simulator.spec.plan import Plan, Stage

BUDGET = 60


def answer_of(
    policy: RecomputePolicy, *, gpu: str = "T4", model: str = "gpt2-xl", zero: int = 0
) -> tuple[Question, Answer]:
    """What the planner says of a model on 16 GPUs."""
    job = Job(
        "share", preset(model), 256, 1024,
        precision="bf16", max_tp=2, recompute=policy, zero=zero,  # type: ignore[arg-type]  # a literal
    )  # fmt: skip
    cluster = Cluster((Pool("us-central1-a", gpu, f"{gpu}x8", 8, 16),), load_catalogue())
    question = Question(job, cluster, Measurements(), budget=BUDGET, prefer="fastest")
    return question, plan_job(question)


def stages_of(plan: Plan | None) -> list[Stage]:
    assert plan is not None
    return [stage for pipeline in plan.pipelines for stage in pipeline.stages]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_as_few_layers_are_recomputed_as_fit_where_that_is_faster(zero: int) -> None:
    question, found = answer_of("auto", zero=zero)
    for policy in ("none", "full"):
        _, other = answer_of(policy, zero=zero)  # type: ignore[arg-type]  # a literal
        assert found.objective is not None
        assert other.objective is None or found.objective < other.objective
    assert found.plan is not None
    judge = estimator(
        "event", job=question.job, cluster=question.cluster, measurements=question.measurements
    )
    shares = 0
    for p, pipeline in enumerate(found.plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if not stage.recomputed:
                continue
            shares += isinstance(stage.recompute, int)
            fewer = replace(stage, recompute=stage.recomputed - 1 or "none")
            stages = (*pipeline.stages[:s], fewer, *pipeline.stages[s + 1 :])
            pipelines = list(found.plan.pipelines)
            pipelines[p] = replace(pipeline, stages=stages)
            changed = replace(found.plan, pipelines=tuple(pipelines))
            assert not judge.estimate(changed).memory[p][s].fits, "one layer less would fit"
    assert shares
    assert RECOMPUTING in found.space


@pytest.mark.slow
def test_nothing_is_recomputed_where_memory_suffices() -> None:
    _, found = answer_of("auto", gpu="A100-80")
    _, none = answer_of("none", gpu="A100-80")
    assert {stage.recompute for stage in stages_of(found.plan)} == {"none"}
    assert found.plan == none.plan
    assert RECOMPUTING not in none.space
