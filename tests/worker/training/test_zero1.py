"""ZeRO-1 changes where moments are kept and no bit of the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulator.models.families import build_model
from simulator.spec.plan import Pipeline
from tests.simulator.worlds import place, world_of
from tests.worker.random_plan import any_plan
from tests.worker.threads import ThreadCollective, ThreadWorld
from tests.worker.training_runs import SomeLabels, drawn, plan_of, small_job, trained
from worker.layout.rank_layout import rank_places, sync_buckets
from worker.training import gradient_sync, zero1
from worker.training.trainer import RankTrainer

JOB = small_job(tied=True, clip_norm=1.0)


@pytest.mark.slow
def test_zero1_is_bit_equal_under_any_plan(examples):
    for seed in range(examples // 8):
        plan = any_plan(drawn(f"zero {seed}"), JOB)
        plain, sharded = (trained(replace(JOB, zero=zero), plan, steps=3) for zero in (0, 1))
        assert sharded.disagreements == [], plan
        assert [r.loss for r in plain.reports] == [r.loss for r in sharded.reports]
        assert plain.state.keys() == sharded.state.keys()
        for key, values in plain.state.items():
            assert torch.equal(values, sharded.state[key]), (plan, key)


MIXED = plan_of(1, (2, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 3, 1), (3, 5, 2)]), (4, [(0, 5, 1)]))


@pytest.mark.parametrize("copies_bytes", [0, 20_000, None])
def test_no_rank_needs_sums_of_gradients_that_it_does_not_own(monkeypatch, copies_bytes):
    """Between threads a sum for one rank leaves NaN on all others; also with little memory."""
    for module in () if copies_bytes is None else (gradient_sync, zero1):
        monkeypatch.setattr(module, "COPIES_BYTES_MAX", copies_bytes)
    plain, sharded = (trained(replace(JOB, zero=zero), MIXED, steps=3) for zero in (0, 1))
    assert [r.grad_norm for r in plain.reports] == [r.grad_norm for r in sharded.reports]
    for key, values in plain.state.items():
        assert torch.equal(values, sharded.state[key]), key
    for trainer in sharded.trainers:
        for bucket in sync_buckets(trainer.holdings):
            if trainer.rank in bucket.ranks:
                buffer = trainer.buffers[bucket.layer]
                is_known = buffer.gather_bucket(buffer.gradient, bucket).isfinite().all()
                copied = not bucket.with_unsplit and bucket.atoms != buffer.held
                assert copied or is_known == (bucket.owner == trainer.rank)


def test_gradients_go_to_their_owners_alone(monkeypatch):
    """Each bucket in one reduction; with ZeRO-1 nothing but the votes is summed on all ranks."""
    summed: list[tuple[str, int]] = []
    for name in ("start_all_reduce", "start_reduce"):
        start = getattr(ThreadCollective, name)

        def count(group, tensor, *args, start=start, name=name, **how):
            to_one = f" to {group._ranks[how['target']]}" if how else ""
            if tensor.dtype == torch.float32:  # Votes have more digits.
                summed.append((f"{name}{to_one}", tensor.numel()))
            return start(group, tensor, *args, **how)

        monkeypatch.setattr(ThreadCollective, name, count)
    plan = plan_of(1, (2, [(0, 2, 1), (2, 5, 1)]), (6, [(0, 5, 1)]))
    for zero in (0, 1):
        summed.clear()
        run = trained(replace(JOB, zero=zero), plan)
        wanted: list[tuple[str, int]] = []
        for bucket in sync_buckets(run.trainers[0].holdings):
            buffer = run.trainers[bucket.owner].buffers[bucket.layer]
            name = f"start_reduce to {bucket.owner}" if zero else "start_all_reduce"
            wanted += [(name, buffer.gradient.numel())] * len(bucket.ranks)
        assert sorted(summed) == sorted(wanted)
    assert len({name for name, _ in summed}) > 1, "owners take turns"


def test_moments_are_kept_by_one_rank():
    plan = plan_of(1, (2, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 2, 2), (2, 5, 1)]), (4, [(0, 5, 1)]))
    held = {}
    for zero in (0, 1):
        run = trained(replace(JOB, zero=zero), plan)
        buffers = [m for trainer in run.trainers for m in trainer.buffers.values()]
        held[zero] = sum(context.numel() for buffer in buffers for context in buffer.moments)
        parts = [
            (trainer.rank, part)
            for trainer in run.trainers
            for m in trainer.buffers.values()
            for part in m.owned
        ]
        if zero:
            assert len({part for _, part in parts}) == len(parts), "two ranks own one part"
            assert all(rank == part.owner for rank, part in parts)
    # A rank that owns one bucket of a layer allocates moments for all of the layer.
    assert held[1] < 0.6 * held[0]


def test_ownership_is_balanced():
    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    run = trained(replace(JOB, zero=1), plan)
    owned = [
        sum(len(buffer.master) for buffer in trainer.buffers.values() if buffer.moments)
        for trainer in run.trainers
    ]
    assert min(owned) > 0.3 * sum(owned)


WHOLE, HALVES = [(0, 5, 1)], [(0, 5, 2)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "pipelines",
    [
        [(1, WHOLE)] * 3,
        [(1, HALVES)] * 3,
        [(1, [(0, 2, 1), (2, 5, 1)]), (1, [(0, 4, 2), (4, 5, 1)]), (1, WHOLE)],
    ],
)
def test_estimated_state_is_what_the_fullest_rank_allocates(pipelines, tied):
    """Weights in bf16, gradients, fp32 copies and moments; no tensor here needs padding."""
    model = build_model(
        "llama", layers=3, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=128, tied=tied
    )
    job = small_job(model=model, zero=1, precision="bf16", max_tp=2)
    plan = plan_of(1, *pipelines)
    here = (place("A100-40"),)
    placed = tuple(
        Pipeline(one.micro_batches, tuple(replace(s, places=here) for s in one.stages))
        for one in plan.pipelines
    )
    memory = world_of(job).estimator.estimate(replace(plan, pipelines=placed)).memory
    found: dict[tuple[int, int], int] = {}
    places = rank_places(plan)
    world = ThreadWorld(len(places))
    for at in places:
        trainer = RankTrainer(job, plan, at.rank, world.transport(at.rank), SomeLabels(job))
        tensors = [
            tensor
            for buffer in trainer.buffers.values()
            for tensor in (buffer.compute, buffer.master, buffer.gradient, *buffer.moments)
        ]
        stage = at.pipeline, at.stage
        found[stage] = max(found.get(stage, 0), sum(tensor.nbytes for tensor in tensors))
        trainer.close()
    for (p, s), allocated in found.items():
        device = memory[p][s]
        assert device.parameters + device.gradients + device.optimizer == allocated, (p, s)
