"""What sequence parallelism changes in a job's costs, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.shared_token_costs import SharedTokenCosts
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.worlds import place, random_profile, small_model, stage, world_of

JOB = Job("large", preset("llama-2-7b"), 16, 4096, precision="bf16", max_tp=8)
A100 = "A100-40"


def costs_of(job: Job = JOB, **parts) -> LayerCosts:
    return world_of(job, **parts).costs


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_blocks_keep_less_and_take_less_time(tp: int) -> None:
    plain = costs_of()
    shared = SharedTokenCosts(plain)
    about = {"tp": tp, "samples": 1, "gpu": A100}
    for recompute in ("none", "full"):
        kept, less = (each.kept_bytes(**about, recompute=recompute) for each in (plain, shared))
        assert (less[1:] < kept[1:]).all(), "layer 0 keeps token ids only"
    before, now = (each.times(A100, tp=tp, samples=1) for each in (plain, shared))
    assert (now.forward <= before.forward).all()
    assert (now.forward < before.forward)[1:-1].all(), "an embedding is bound by its launch"
    assert (now.backward < before.backward)[1:-1].all()
    assert now.provenance == before.provenance, "what is computed is as sure as before"


def test_kept_bytes_of_a_llama_block_are_those_of_the_design() -> None:
    """MiB of a sample of 4,096 tokens; docs/adr/0111."""
    shared = SharedTokenCosts(costs_of())
    found = {
        tp: round(shared.kept_bytes(tp=tp, samples=1, recompute="none")[2] / 2**20) for tp in (4, 8)
    }
    assert found == {4: 198, 8: 131}


def test_one_rank_shares_with_none() -> None:
    plain = costs_of()
    shared = SharedTokenCosts(plain)
    for what in ("kept_bytes", "workspace_bytes"):
        for recompute in ("none", "full"):
            rows = (
                getattr(each, what)(tp=1, samples=2, recompute=recompute, gpu=A100)
                for each in (plain, shared)
            )
            assert np.array_equal(*rows)
    assert shared.times(A100, tp=1, samples=2) is plain.times(A100, tp=1, samples=2)


def test_measured_times_are_scaled_with_a_wide_error_bar() -> None:
    job = Job("small", small_model(), 8, 128, precision="fp32", max_tp=4)
    profile = random_profile(Random(1), job)
    gpu, tp, samples = next(key for key in profile.timings if key[1] > 1)
    plain = costs_of(job, profile=profile)
    before, now = (
        each.times(gpu, tp=tp, samples=samples) for each in (plain, SharedTokenCosts(plain))
    )
    assert before.provenance.source != "analytic"
    assert now.provenance.source == "interpolated"
    assert now.provenance.relative_error >= 0.25
    assert "measured without sequence parallelism" in now.provenance.notes[0]
    assert (now.forward <= before.forward).all()


def test_an_estimate_has_less_memory_and_time_and_ranks_gather_for_other_degrees() -> None:
    world = world_of(JOB)

    def plan(*degrees: int) -> Plan:
        cuts = ((0, 17), (17, 34))
        stages = (stage(*cut, place(A100), tp=tp) for cut, tp in zip(cuts, degrees, strict=True))
        return Plan(1, (Pipeline(16, tuple(stages)),))

    for degrees in ((4, 4), (4, 2), (1, 4)):
        without, with_it = (
            world.estimator.estimate(replace(plan(*degrees), sequence_parallel=shares))
            for shares in (False, True)
        )
        assert with_it.iteration_s < without.iteration_s
        for one, other, tp in zip(without.memory[0], with_it.memory[0], degrees, strict=True):
            if tp == 1:
                assert one.activations == other.activations
            else:
                assert other.activations < one.activations
                assert (other.communication < one.communication) is (degrees == (4, 4))
