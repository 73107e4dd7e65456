"""Holders and gradient sums of random plans: complete and without duplicates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from simulator.models.families import build_model
from simulator.spec.plan import Plan
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.training_runs import drawn, image_job, plan_of, small_job
from worker.layout.rank_layout import (
    ALIGNMENT,
    TIED,
    all_buckets,
    atoms_layout,
    groups_of,
    holdings_of,
    neighbouring_stage,
    plan_problems,
    rank_places,
    receivers_of,
    sample_positions,
    segments,
    sender_for,
    sync_buckets,
    unsplit_layout,
)
from worker.layout.tensor_table import holdings_for, table_of
from worker.types import LogicalTensor

JOBS = [small_job(tied=True), small_job(tied=False), small_job("llama", tied=False)]


def cases(examples):
    for seed in range(examples):
        draw = drawn(seed)
        job = draw.choice(JOBS)
        plan = any_plan(draw, job, ranks_max=14)
        yield job, plan, holdings_for(plan, job)
        interleaved = any_interleaved_plan(draw, job)
        if interleaved is not None:
            yield job, interleaved, holdings_for(interleaved, job)


def test_every_replica_holds_every_atom_once(examples):
    for job, plan, holdings in cases(examples):
        for layer in range(len(job.model.layers)):
            held = Counter(atom for h in holdings.holders[layer] for atom in h.atoms)
            assert held == dict.fromkeys(range(job.max_tp), len(plan.pipelines))


def test_each_atom_is_summed_once_over_all_holders(examples):
    for _, _, holdings in cases(examples):
        units = sync_buckets(holdings)
        for layer, holders in holdings.holders.items():
            mine = [unit for unit in units if unit.layer == layer]
            for atom in range(holdings.atoms if holdings.has_split(layer) else 0):
                having = tuple(h.rank for h in holders if atom in h.atoms)
                summed = [unit.ranks for unit in mine if atom in unit.atoms]
                assert summed == ([having] if len(having) > 1 else [])
            whole = [unit.ranks for unit in mine if unit.with_unsplit]
            several = holdings.has_unsplit(layer) and len(holders) > 1
            assert whole == ([tuple(h.rank for h in holders)] if several else [])


def test_no_rank_holds_part_of_a_bucket(examples):
    for _, _, holdings in cases(examples):
        for unit in sync_buckets(holdings):
            for holder in holdings.holders[unit.layer]:
                common = set(unit.atoms) & set(holder.atoms)
                assert common in (set(), set(unit.atoms))


def test_all_ranks_sum_in_one_order_that_follows_the_backward_pass(examples):
    for _, _, holdings in cases(examples):
        units = sync_buckets(holdings)
        assert [unit.layer for unit in units] == sorted((u.layer for u in units), reverse=True)
        for one, other in pairwise(units):
            if one.layer == other.layer:
                assert not one.with_unsplit, "what is not cut comes after the atoms"
                assert other.with_unsplit or one.atoms.stop <= other.atoms.start


def test_each_atom_has_one_owner_who_holds_it(examples):
    """It reports the atom's norm."""
    for job, _, holdings in cases(examples):
        buckets = all_buckets(holdings)
        spoken = Counter(
            (bucket.layer, atom)
            for bucket in buckets
            for atom in (*bucket.atoms, *(["whole"] if bucket.with_unsplit else []))
        )
        layers = [*range(len(job.model.layers)), TIED]
        atoms = {(k, a) for k in layers if holdings.has_split(k) for a in range(job.max_tp)}
        wholes = {(k, "whole") for k in layers if holdings.has_unsplit(k)}
        assert spoken == dict.fromkeys(atoms | wholes, 1)
        held = {(h.rank, k, a) for k in layers for h in holdings.holders[k] for a in h.atoms}
        assert {(b.owner, b.layer, atom) for b in buckets for atom in b.atoms} <= held


def test_sender_and_receiver_of_activations_agree(examples):
    for _, plan, _ in cases(examples):
        places = rank_places(plan)
        for place in places:
            for step in (-1, 1):
                for other in neighbouring_stage(places, place, step=step):
                    sends = place in receivers_of(
                        other, neighbouring_stage(places, other, step=-step)
                    )
                    takes = sender_for(place, neighbouring_stage(places, place, step=step)) == other
                    assert sends == takes


def test_pipelines_partition_the_batch(examples):
    for job, plan, _ in cases(examples):
        positions = [
            position
            for number, pipeline in enumerate(plan.pipelines)
            for micro_batch in range(pipeline.micro_batches)
            for position in sample_positions(plan, pipeline=number, micro_batch=micro_batch)
        ]
        assert positions == list(range(job.global_batch))


def test_every_group_is_opened_before_it_is_needed(examples):
    for _, plan, holdings in cases(examples):
        groups = groups_of(plan, holdings)
        assert len(set(groups)) == len(groups)
        assert {unit.ranks for unit in sync_buckets(holdings)} <= set(groups)
        assert {s.tp_ranks for s in rank_places(plan) if s.tp > 1} <= set(groups)


def test_segments_are_as_coarse_as_possible():
    job = replace(small_job(), max_tp=4)
    tables = [table_of(job, index) for index in range(5)]
    plan = plan_of(4, (1, [(0, 5, 2)]), (1, [(0, 5, 4)]))
    holders = holdings_of(plan, tables, atoms=4).holders[2]
    assert segments(holders, atoms=4) == (range(1), range(1, 2), range(2, 3), range(3, 4))
    plan = plan_of(4, (1, [(0, 5, 2)]), (1, [(0, 5, 1)]))
    holders = holdings_of(plan, tables, atoms=4).holders[2]
    assert segments(holders, atoms=4) == (range(2), range(2, 4))


def test_unsplit_layers_are_one_bucket():
    job = small_job(tied=False)
    tables = [table_of(job, index) for index in range(5)]
    plan = plan_of(4, (1, [(0, 5, 1)]), (1, [(0, 5, 1)]))
    units = sync_buckets(holdings_of(plan, tables, atoms=4))
    assert [(unit.layer, unit.with_unsplit) for unit in units] == [
        (n, True) for n in (4, 3, 2, 1, 0)
    ]


def test_tied_tensor_is_held_by_both_ends_and_summed_last():
    job = small_job(tied=True)
    tables = [table_of(job, index) for index in range(5)]
    plan = plan_of(4, (2, [(0, 1, 2), (1, 4, 1), (4, 5, 4)]))
    holdings = holdings_of(plan, tables, atoms=4)
    assert [h.rank for h in holdings.holders[TIED]] == [0, 1, 3, 4, 5, 6]
    assert [spec.name for spec in holdings.tables[TIED]] == ["token.weight"]
    assert "token.weight" not in [spec.name for spec in holdings.tables[0]]
    last = sync_buckets(holdings)[-1]
    assert (last.layer, last.atoms, last.ranks) == (TIED, range(3, 4), (1, 6))


def test_flat_layout_is_aligned_and_holds_each_element_once():
    specs = (
        LogicalTensor("w", (6, 8), 1),
        LogicalTensor("n", (5,), None),
        LogicalTensor("b", (8,), 0),
    )
    split = atoms_layout(specs, range(1, 3), atoms=4)
    assert [(s.spec.name, s.offset, s.shape) for s in split.slots] == [
        ("w", 0, (6, 4)),
        ("b", ALIGNMENT, (4,)),
    ]
    whole = unsplit_layout(specs)
    assert [(s.spec.name, s.offset, s.shape) for s in whole.slots] == [("n", 0, (5,))]
    assert (split.elements, whole.elements) == (2 * ALIGNMENT, ALIGNMENT)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"schedule": "interleaved"},
            "plan: pipelines[0].stages: has one device group, so chunks would shorten no wait",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 2},
            "plan: pipelines[0].stages: has 1 stages, not a multiple of 2 virtual stages",
        ),
        ({"split": (1, 1)}, "plan: pipelines[0].stages[0].split: stages that split micro batches"),
        ({"tp": 2, "max_tp": 3}, "plan: pipelines[0].stages[0].tp: 2 does not divide"),
        ({"tp": 8}, "plan: pipelines[0].stages[0].tp: "),
        ({"layers": (0, 4)}, "layers: [0, 4) leaves out layer 4 at the end"),
        ({"decay": "cosine"}, "training.steps: the cosine schedule needs an end"),
        (
            {"sequence_parallel": True, "tp": 4},
            "plan: sequence_parallel: is true, but TP 4 does not divide samples of 6 tokens",
        ),
        (
            {"schedule": "zero-bubble"},
            'plan: schedule: is zero-bubble, which no runtime runs yet; give "1f1b"',
        ),
        (
            {"sequence_parallel": True, "schedule": "zero-bubble"},
            "plan: sequence_parallel: is true, which is not estimated with zero-bubble",
        ),
        (
            {"outer_every": 50},
            "plan: outer_every: is 50, and no runtime takes outer steps yet; leave it out",
        ),
        (
            {"outer_every": 50},
            "plan: outer_every: is 50, but all pipelines share zones, so they are one group",
        ),
        (
            {"offload": 2},
            "plan: pipelines[0].stages[0].offload: is 2, and no runtime offloads activations yet",
        ),
        (
            {"offload": 2, "schedule": "zero-bubble"},
            "plan: schedule: is zero-bubble, with which offload is not estimated",
        ),
        ({"micro_batches": 3}, "12 samples, 4 too many for the global batch of 8"),
    ],
)
def test_unsupported_plans_are_refused_with_a_reason(change, said):
    job = replace(
        small_job(), max_tp=change.get("max_tp", 4), schedule=change.get("decay", "constant")
    )
    plan = plan_of(4, (change.get("micro_batches", 2), [(0, 5, change.get("tp", 1))]))
    stage = plan.pipelines[0].stages[0]
    stage = replace(
        stage, **{k: v for k, v in change.items() if k in ("layers", "split", "offload")}
    )
    pipeline = replace(plan.pipelines[0], stages=(stage,))
    schedule, chunks = change.get("schedule", "1f1b"), change.get("virtual_stages", 1)
    shares = change.get("sequence_parallel", False)
    plan = Plan(4, (pipeline,), schedule, chunks, sequence_parallel=shares)
    plan = replace(plan, outer_every=change.get("outer_every"))
    assert any(said in str(problem) for problem in plan_problems(plan, job)), plan_problems(
        plan, job
    )


def test_ranks_share_the_tokens_of_built_in_language_models_only():
    """A vision model's head reads the first token; of a user's module we know no split parts."""
    plan = replace(plan_of(4, (2, [(0, 5, 1)])), sequence_parallel=True)
    own = replace(small_job(), model=replace(small_job().model, architecture=None))
    for job, refused in ((small_job(), False), (image_job(), True), (own, True)):
        said = [str(problem) for problem in plan_problems(plan, job)]
        assert any("built-in language models only" in each for each in said) is refused, said


def test_a_valid_plan_has_no_problem(examples):
    for job, plan, _ in cases(examples):
        assert plan_problems(plan, job) == ()


@pytest.mark.parametrize("runtime", ["sailor", "megatron-deepspeed"])
def test_a_tp_degree_that_no_rank_can_hold_is_told_once(runtime):
    job = replace(small_job(max_tp=4), runtime=runtime)
    model = build_model("gpt2", layers=3, hidden=24, heads=12, ffn=48, vocab=48)
    plan = plan_of(8, (1, [(0, len(model.layers), 3)]))
    said = [str(each) for each in plan_problems(plan, replace(job, model=model))]
    assert sum("3 does not divide the job's largest TP degree of 4" in each for each in said) == 1
