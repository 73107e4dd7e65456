"""State that one plan sealed is restored bit-equal under any other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simulator.models.families import build_model
from simulator.spec.job import Job
from tests.worker.checkpoint.snapshot_runs import folders, on_nodes, restore, state_only, train
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels, drawn, small_job, trained
from worker.checkpoint.fetch import PieceNotFoundError
from worker.checkpoint.placement import pieces_needed, sizes_of, state_shape
from worker.checkpoint.snapshot_file import sealed_files
from worker.layout.tensor_table import holdings_for
from worker.training.trainer import RankTrainer


def exact_job(**changes) -> Job:
    model = build_model("exact", layers=2, hidden=16, heads=4, ffn=24, vocab=30, sequence=8)
    job = Job("exact", model, global_batch=8, sequence=8, max_tp=4, learning_rate=0.01)
    return replace(job, **changes)


JOBS = {
    "exact": exact_job(),
    "exact-zero": exact_job(zero=1, clip_norm=0.5),
    "tied": small_job(tied=True),
    "untied": small_job(tied=False, optimizer="sgd", learning_rate=0.05),
    "grouped": small_job("llama", optimizer="adamw"),
    "bf16": small_job("llama", precision="bf16"),
    "fp16-zero": small_job(tied=True, precision="fp16", zero=1),
    "one-atom": small_job(max_tp=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_any_plan_restores_what_any_other_sealed(name, tmp_path, examples):
    """Plans follow each other without training in between."""
    job, draw = JOBS[name], drawn(f"restore {name}")
    first = on_nodes(any_plan(draw, job), draw)
    before = train(job, first, tmp_path, number=1, steps=2)
    assert state_only(before)
    for number in range(2, 2 + max(3, examples // 10)):
        plan = on_nodes(any_plan(draw, job), draw)
        if number == 3:
            plan = on_nodes(any_interleaved_plan(draw, job) or plan, draw)
        after = train(job, plan, tmp_path, number=number, steps=0, after=before)
        assert after.step == before.step
        assert state_only(after).keys() == state_only(before).keys()
        for key, values in state_only(before).items():
            assert torch.equal(after.state[key], values), (key, plan)
        before = after


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "exact-zero"])
def test_training_continues_bit_equal_after_a_restore(name, tmp_path, examples):
    """Also from ranks that share tokens to ranks that do not, and back."""
    job, draw = JOBS[name], drawn(f"go on {name}")
    expected = []
    after = None
    for number in range(1, 1 + max(4, examples // 10)):
        plan = on_nodes(any_plan(draw, job), draw)
        if number == 2:
            plan = on_nodes(any_interleaved_plan(draw, job) or plan, draw)
        plan = replace(plan, sequence_parallel=number % 2 == 0)
        after = train(job, plan, tmp_path, number=number, steps=draw.randint(1, 3), after=after)
        expected += after.reports
    plain = trained(job, any_plan(draw, job), steps=len(expected), compare=False)
    assert [report.loss for report in plain.reports] == [report.loss for report in expected]
    assert [report.sample_hash for report in plain.reports] == [r.sample_hash for r in expected]
    for key, values in state_only(after).items():
        assert torch.equal(plain.state[key], values), key


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_each_piece_has_a_holder_one_writer_and_two_nodes(name, tmp_path, examples):
    job, draw = JOBS[name], drawn(f"cover {name}")
    layers, atoms = len(job.model.layers), job.max_tp
    everything = {(n, p) for n in range(layers + 1) for p in range(atoms + 1)}
    for number in range(1, 1 + max(2, examples // 20)):
        plan = on_nodes(any_plan(draw, job), draw)
        done = train(job, plan, tmp_path, number=number, steps=1)
        found = [(f.header.node, p) for f in files(tmp_path, done) for p in f.header.pieces]
        assert {piece.key for _, piece in found} == everything
        written = [piece.key for _, piece in found if piece.is_written]
        assert sorted(written) == sorted(everything), "a piece is written twice, or not at all"
        members = {node for node, _ in found}
        for key in everything if len(members) > 1 else ():
            homes = {node for node, piece in found if piece.key == key}
            buddies = {piece.buddy for _, piece in found if piece.key == key} - {None}
            assert len(homes) > 1 or (len(buddies) == 1 and not buddies & homes), key
            assert len(homes) == 1 or not buddies, "an unneeded replica is made"
            assert buddies <= members


def test_under_zero_moments_are_read_by_the_rank_that_keeps_them_alone(tmp_path):
    job, draw = JOBS["exact-zero"], drawn("moments")
    plan = on_nodes(any_plan(draw, job), draw)
    while len(plan.pipelines) < 3:
        plan = on_nodes(any_plan(draw, job), draw)
    before = train(job, plan, tmp_path, number=1, steps=1)

    def read(transport: ThreadTransport) -> int:
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        return sum(restore(trainer, tmp_path, before).bytes_by_source.values())

    holdings = holdings_for(plan, job)
    sizes = sizes_of(holdings, state_shape(job))
    held = [pieces_needed(holdings, rank, zero=1) for rank in range(plan.device_count)]
    weights = sum(sizes[key] // 3 for each in held for key in each)
    assert sum(run_as_threads(plan.device_count, read)) == weights + sum(sizes.values()) * 2 // 3


def files(root: Path, done) -> list:
    return [found for source in folders(root, done) for found in sealed_files(source.folder)]


@pytest.mark.slow
def test_flipped_byte_is_named_and_another_holder_is_used(tmp_path):
    job, draw = JOBS["exact"], drawn("flip")
    plan = on_nodes(any_plan(draw, job, stages_max=1), draw)
    while len({each.stages[0].places[0].node for each in plan.pipelines}) < 2:
        plan = on_nodes(any_plan(draw, job, stages_max=1), draw)
    before = train(job, plan, tmp_path, number=1, steps=1)
    found = files(tmp_path, before)
    keeps = Counter(p.key for file in found for p in file.header.pieces if p.bytes)
    victim, piece = next(
        (file, p) for file in found for p in file.header.pieces if keeps[p.key] > 1
    )
    damage(victim.path, piece.offset + 5)
    after = train(job, plan, tmp_path, number=2, steps=0, after=before)
    for key, values in state_only(before).items():
        assert torch.equal(after.state[key], values), key
    for other in files(tmp_path, before):
        for its in other.header.pieces:
            if its.key == piece.key and other.path != victim.path:
                damage(other.path, its.offset + 5)
    where = rf"\.snap: piece {piece.piece} of layer {piece.layer} is damaged"
    with pytest.raises(PieceNotFoundError, match=where):
        train(job, plan, tmp_path, number=3, steps=0, after=before)


def damage(path, offset):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_snapshot_of_another_model_is_refused(tmp_path):
    job, draw = JOBS["tied"], drawn("another")
    plan = on_nodes(any_plan(draw, job), draw)
    before = train(job, plan, tmp_path, number=1, steps=1)
    for other in (JOBS["untied"], replace(job, optimizer="sgd")):
        with pytest.raises(PieceNotFoundError, match="of another model"):
            train(other, plan, tmp_path, number=2, steps=0, after=before)
