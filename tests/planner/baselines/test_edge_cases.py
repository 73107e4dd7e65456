"""Planners of one kind, and DTFM, in edge cases: valid plans or a reason."""

from __future__ import annotations

import pytest

from planner.baselines.dtfm.planner import DtfmPlanner
from planner.baselines.galvatron.planner import GalvatronPlanner
from planner.baselines.oobleck.planner import OobleckPlanner
from planner.baselines.piper.planner import PiperPlanner
from simulator.inputs.plan_check import check_plan
from simulator.models.families import build_model
from tests.planner.baselines.small_case import pool, small_case

PLANNERS = (PiperPlanner(), GalvatronPlanner(), OobleckPlanner(), DtfmPlanner())
ONE_BLOCK = build_model("gpt2", layers=1, hidden=64, heads=8, vocab=512, sequence=2048, tied=True)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@pytest.mark.parametrize("mode", ["fixed", "published"])
@pytest.mark.parametrize(
    "pools",
    [
        (),
        (pool("A100-40", 0, per_machine=4),),
        (pool("A100-40", 1, per_machine=1),),
        (pool("V100-16", 6, per_machine=6), pool("T4", 1, per_machine=1, zone="us-west1-a")),
    ],
    ids=["nothing", "empty-pool", "one-gpu", "odd-machines"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch": 1},
        {"recompute": "full", "micro_batches": (3, 4), "global_batch": 24},
        {"micro_batches": (5,)},
        {"model": ONE_BLOCK, "precision": "bf16", "recompute": "auto", "max_tp": 1},
    ],
    ids=["batch-of-one", "given-sizes", "no-size-divides", "one-block"],
)
def test_every_proposal_is_a_valid_plan_or_explained(planner, mode, pools, changes):
    case = small_case(*pools, **changes)
    proposals = planner.proposals(case, mode)
    if sum(one.gpus for one in pools) == 0:
        assert proposals == []
    for proposal in proposals:
        if proposal.plan is None:
            assert proposal.why_not
        else:
            assert check_plan(proposal.plan, case.job, case.cluster) == ()
