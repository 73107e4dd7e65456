"""Which of its layers a rank recomputes: the plan says how many of each stage's first ones."""

from __future__ import annotations

import pytest
import torch

from simulator.models.families import build_model
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.worker.training_runs import HERE, small_job, trained
from worker.training import trainer
from worker.training.pipeline_stage import StageRunner


@pytest.fixture
def chosen(monkeypatch):
    """The recomputed layers of each chunk, by its layers, in the trainers that follow."""
    found = {}

    class Seen(StageRunner):
        def __init__(self, layers, *, recomputed, **rest):
            found.setdefault(tuple(layer.index for layer in layers), set()).add(recomputed)
            super().__init__(layers, recomputed=recomputed, **rest)

    monkeypatch.setattr(trainer, "StageRunner", Seen)
    return found


def job_of(**changes):
    """Return a job of nine layers: the first is an embedding, the last one a head."""
    model = build_model("llama", layers=7, hidden=16, heads=4, kv_heads=2, ffn=32, vocab=30)
    return small_job(model=model, **changes)


def stages_of(*recompute, tp=1):
    """Return three stages of three layers each."""
    spans = [(0, 3), (3, 6), (6, 9)]
    return tuple(Stage(s, tp, (HERE,), how) for s, how in zip(spans, recompute, strict=True))


def test_a_rank_recomputes_the_first_layers_of_its_stage(chosen):
    """Each rank of a TP group does; embeddings and heads are never recomputed."""
    pipelines = (
        Pipeline(2, stages_of("none", 1, "full", tp=2)),
        Pipeline(2, (Stage((0, 1), 1, (HERE,)), Stage((1, 9), 1, (HERE,), 5))),
    )
    trained(job_of(), Plan(2, pipelines))
    assert chosen.pop((0, 1, 2)) == {frozenset()}
    assert chosen.pop((3, 4, 5)) == {frozenset({3})}
    assert chosen.pop((6, 7, 8)) == {frozenset({6, 7})}
    assert chosen.pop((0,)) == {frozenset()}
    assert chosen == {tuple(range(1, 9)): {frozenset(range(1, 6))}}


def test_each_chunk_has_its_own_share(chosen):
    spans = [(0, 3), (3, 5), (5, 7), (7, 9)]
    stages = (Stage(s, 1, (HERE,), r) for s, r in zip(spans, (2, "full", 1, "none"), strict=True))
    trained(job_of(), Plan(2, (Pipeline(4, tuple(stages)),), "interleaved", 2))
    assert chosen == {
        (0, 1, 2): {frozenset({1})},
        (3, 4): {frozenset({3, 4})},
        (5, 6): {frozenset({5})},
        (7, 8): {frozenset()},
    }


def test_the_result_is_the_same_whatever_is_recomputed():
    """Bit by bit, with dropout: the same operations run on the same numbers."""
    job = job_of(dropout=0.2)
    states = []
    for how in (["none"] * 3, ["full"] * 3, [2, 1, 2], [1, "none", 1]):
        states.append(trained(job, Plan(2, (Pipeline(4, stages_of(*how)),)), steps=2).state)
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][key]) for key, tensor in state.items())
