"""Ranks whose data differs train on nothing: they say so before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from simulator.documents.problems import InputError
from simulator.spec.plan import Place, Plan
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels, plan_of, small_job
from worker.data.batch import Samples
from worker.script.recipe import Recipe
from worker.training.same_start import check_same_start
from worker.training.trainer import RankTrainer

JOB = small_job()
LAST = len(JOB.model.layers)
STAGES = plan_of(1, (JOB.global_batch, [(0, 2, 1), (2, LAST, 1)]))
PIPELINES = plan_of(1, *[(JOB.global_batch // 2, [(0, LAST, 1)])] * 2)
MIDDLE = plan_of(1, (JOB.global_batch, [(0, 1, 1), (1, 2, 1), (2, LAST, 1)]))


class Reordered(SomeLabels):
    """The samples of a machine that lists a folder in another order."""

    def batch(self, step: int, positions: range) -> Samples:
        return super().batch(step + 1, positions)


def on_nodes(plan: Plan) -> Plan:
    """The plan with its n-th stage on the n-th node."""
    names = iter("abc")
    return replace(
        plan,
        pipelines=tuple(
            replace(
                line,
                stages=tuple(
                    replace(stage, places=(Place("A100-40", "m", "z", node=next(names)),))
                    for stage in line.stages
                ),
            )
            for line in plan.pipelines
        ),
    )


def told(plan: Plan, *, odd: int) -> list[str]:
    """What each rank says where one of them has other data; empty: it trained a step."""

    def body(transport: ThreadTransport) -> str:
        data = (Reordered if transport.rank == odd else SomeLabels)(JOB)
        trainer = RankTrainer(JOB, plan, transport.rank, transport, data)
        try:
            trainer.step()
        except InputError as error:
            return str(error)
        return ""

    return run_as_threads(plan.device_count, body)


@pytest.mark.parametrize("plan", [STAGES, PIPELINES], ids=["stages", "pipelines"])
def test_ranks_with_other_samples_are_named_by_all(plan: Plan) -> None:
    said = told(on_nodes(plan), odd=1)
    assert len(set(said)) == 1
    assert "rank 0 on a and rank 1 on b load different samples: the first of step 0" in said[0]
    assert "glob" in said[0]


@pytest.mark.parametrize(("plan", "odd"), [(STAGES, -1), (PIPELINES, -1), (MIDDLE, 1)])
def test_rank_that_loads_no_samples_is_not_compared(plan: Plan, odd: int) -> None:
    assert set(told(plan, odd=odd)) == {""}


class OtherRank:
    """The group of two ranks, as rank 0 sees it."""

    size, index = 2, 0

    def __init__(self, sample: int, **settings: int) -> None:
        self.other = torch.tensor([[0, each + 1] for each in (sample, *settings.values())])

    def read_sum(self, own: torch.Tensor) -> list[int]:
        return (own + self.other.flatten()).tolist() if len(own) > 1 else own.tolist()


@pytest.mark.parametrize(
    ("groups", "shuffle", "expected"),
    [(1, 2, ""), (1, 3, "different settings: shuffle"), (0, 2, "different settings: groups")],
)
def test_ranks_whose_scripts_give_other_settings_are_named(groups, shuffle, expected) -> None:
    def check() -> None:
        other = OtherRank(5, groups=groups, shuffle=shuffle)
        about = other, on_nodes(PIPELINES), torch.device("cpu")
        check_same_start(5, 0, {"groups": 1, "shuffle": 2}, *about)

    if not expected:
        check()
        return
    with pytest.raises(InputError, match=f"rank 0 on a and rank 1 on b {expected}"):
        check()


def test_a_rank_whose_script_gives_another_setting_does_not_train() -> None:
    """The comparison is made before the first step, and all ranks say the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    given = {
        "dataset": [(torch.ones(4) * index, index % 2) for index in range(8)],
        "batch_size": 8,
        "steps": 2,
        "loss": lambda output, _: (output.square().sum(), len(output)),
    }
    recipe = Recipe(model=model, **given)
    other = Recipe(model=model, eval_every=1, **given)
    job = recipe.job()
    line = plan_of(1, *[(4, [(0, len(job.model.layers), 1)])] * 2)

    def body(transport: ThreadTransport) -> str:
        source = other if transport.rank else recipe
        about = job, line, transport.rank, transport, source.data()
        with pytest.raises(InputError) as raised:
            RankTrainer(*about, module=source).step()
        return str(raised.value)

    said = run_as_threads(2, body)
    assert len(set(said)) == 1
    assert "rank 0 and rank 1 different settings: eval_every" in said[0]
