"""Low precision, loss scales, and non-finite numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from tests.worker.checksums import checksums
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import (
    BadImages,
    SomeLabels,
    alone,
    image_job,
    plan_of,
    small_job,
    trained,
)
from worker.checkpoint.compatibility import dtype_of
from worker.checkpoint.load_state import progress_from, saved_progress
from worker.checkpoint.snapshot_file import SavedProgress, progress_of
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.precision import (
    EXACT,
    FP64,
    GRID,
    GROWTH_STEPS,
    LossScale,
    formats_of,
    loss_factor,
)
from worker.training.step_vote import StepVote
from worker.training.trainer import NotANumberError, RankTrainer, TrainingProgress

MIXED = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 1, 1), (1, 5, 4)]), (1, [(0, 5, 1)]))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "exact"])
def test_dtype_without_torch_matches_the_trainer(precision):
    family, told = ("exact", "fp32") if precision == "exact" else ("gpt2", precision)
    job = small_job(precision=told)
    job = replace(job, model=replace(job.model, family=family))
    assert f"torch.{dtype_of(job)}" == str(formats_of(job).master)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_low_precision_matches_fp32_up_to_rounding(precision, tolerance):
    job = small_job(learning_rate=3e-3)
    wanted = trained(job, alone(job), steps=12, compare=False).reports
    run = trained(replace(job, precision=precision), MIXED, steps=12)
    assert run.disagreements == []
    # The loss scale starts high and falls over the first steps, which are skipped.
    taken = [report for report in run.reports if not report.skipped]
    assert taken[0].loss == pytest.approx(wanted[0].loss, rel=tolerance)
    if precision == "bf16":
        losses = [report.loss for report in run.reports]
        assert losses == pytest.approx([report.loss for report in wanted], rel=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt-neo", "vit"])
def test_every_family_trains_in_low_precision_under_a_mixed_plan(family, precision):
    if family == "vit":
        job = image_job()
        data = BadImages(())
    else:
        job, data = small_job(family), None
    (wanted,) = trained(job, alone(job), compare=False, data=data).reports
    run = trained(replace(job, precision=precision), MIXED, data=data)
    assert run.disagreements == []
    assert run.reports[0].loss == pytest.approx(wanted.loss, rel=2e-3)
    assert run.reports[0].grad_norm == pytest.approx(wanted.grad_norm, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_keep_updates_that_low_precision_would_lose(precision):
    job = small_job(precision=precision, learning_rate=1e-5)
    (trainer,) = trained(job, alone(job), steps=3).trainers
    buffer = trainer.buffers[2]
    assert buffer.master.dtype == torch.float32
    assert buffer.compute.dtype == trainer.precision.compute
    assert torch.equal(buffer.compute, buffer.master.to(buffer.compute.dtype))
    assert not torch.equal(buffer.compute.float(), buffer.master)


def test_overflow_skips_the_update_on_all_ranks_and_halves_the_scale():
    job = small_job(precision="fp16")
    scale = LossScale(2.0**24)

    def body(transport):
        trainer = RankTrainer(job, MIXED, transport.rank, transport, SomeLabels(job))
        trainer.progress = TrainingProgress(scale=scale)
        before = [checksums(buffer) for buffer in trainer.buffers.values()]
        report = trainer.step()
        after = [checksums(buffer) for buffer in trainer.buffers.values()]
        same = all(
            one[key] == other[key]
            for one, other in zip(before, after, strict=True)
            for key in one
            if key[2] != "gradient"
        )
        return report.skipped, same, trainer.progress

    for skipped, same, progress in run_as_threads(8 + 1, body):
        assert skipped
        assert same
        assert (progress.step, progress.updates) == (1, 0)
        assert progress.scale == LossScale(2.0**23)


def test_loss_scale_halves_on_overflow_and_doubles_after_many_good_steps():
    fp16, scale = formats_of(small_job(precision="fp16")), LossScale(4.0)
    assert scale.after(fp16, overflow=True) == LossScale(2.0)
    for before in (2.0, 1.0):
        lowest = LossScale(before).after(fp16, overflow=True)
        assert lowest.factor == 1.0
        assert lowest.restored(fp16, small_job(precision="fp16")) == lowest, "no first scale again"
    for _ in range(GROWTH_STEPS):
        scale = scale.after(fp16, overflow=False)
    assert scale == LossScale(8.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_scale_stays_1_where_no_gradient_underflows(precision):
    """A larger one would excuse steps that are not finite: a smaller scale may cure those."""
    job = image_job(precision=precision, skip_nonfinite=0)
    before = LossScale(1.0, GROWTH_STEPS - 1)
    assert before.after(formats_of(job), overflow=False) == LossScale()

    def body(transport):
        trainer = RankTrainer(job, alone(job), 0, transport, BadImages({1}))
        saved = rank_tensors(trainer.buffers.values())
        state = merge_ranks([saved], tensors_of(job))
        trainer.restore(state, TrainingProgress(scale=LossScale(2.0**40)))
        trainer.step()
        with pytest.raises(NotANumberError):
            trainer.step()

    run_as_threads(1, body)


def test_state_without_a_loss_scale_continues_in_fp16_with_the_first_one():
    """Imported weights have none, and those of other formats have 1."""
    job = small_job(precision="fp16")
    fp16 = formats_of(job)
    first = LossScale.first(fp16, job)
    assert LossScale().restored(fp16, job) == first
    assert LossScale(2.0, 7).restored(fp16, job) == LossScale(2.0, 7)

    def body(transport):
        trainer = RankTrainer(job, alone(job), 0, transport, SomeLabels(job))
        state = merge_ranks([rank_tensors(trainer.buffers.values())], tensors_of(job))
        trainer.restore(state, TrainingProgress(step=100))
        return trainer.progress

    (progress,) = run_as_threads(1, body)
    assert (progress.step, progress.scale) == (100, first)


def test_loss_scale_does_not_change_the_weights():
    job = small_job(precision="fp16")
    results = []
    for factor in (1.0, 64.0):

        def body(transport, factor=factor):
            trainer = RankTrainer(job, alone(job), 0, transport, SomeLabels(job), precision=FP64)
            trainer.progress = TrainingProgress(scale=LossScale(factor))
            return trainer.step(), trainer.buffers[1].master.clone()

        results += run_as_threads(1, body)
    (one, weights), (other, same_weights) = results
    assert one.grad_norm == other.grad_norm
    assert torch.equal(weights, same_weights)


def test_precision_follows_its_name():
    assert formats_of(small_job(precision="bf16")).compute == torch.bfloat16
    assert loss_factor(small_job(), EXACT, LossScale()) == 1.0
    master = torch.tensor([1.00001, -0.33333, 7.0], dtype=torch.float64)
    on_grid = torch.empty_like(master)
    EXACT.derive(master, into=on_grid)
    assert torch.equal(on_grid / GRID, (on_grid / GRID).round())
    assert (on_grid - master).abs().max() <= GRID / 2


PLAIN = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (3, [(0, 2, 1), (2, 5, 1)]))
CHUNKED = replace(
    plan_of(
        1,
        (2, [(0, 1, 2), (1, 2, 1), (2, 3, 2), (3, 5, 1)]),
        (6, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 5, 1)]),
    ),
    schedule="interleaved",
    virtual_stages=2,
)


@pytest.mark.parametrize(
    ("plan", "layer", "rank"),
    [
        (PLAIN, 0, 3),
        (PLAIN, 2, 4),
        (PLAIN, 4, 4),
        (CHUNKED, 0, 3),
        (CHUNKED, 2, 3),
        (CHUNKED, 4, 4),
    ],
)
def test_non_finite_loss_names_step_rank_and_layer(plan, layer, rank):
    job = small_job(tied=False, skip_nonfinite=0)

    def body(transport):
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        trainer.step()
        if transport.rank in (3, 4) and layer in trainer.buffers:
            trainer.buffers[layer].compute.fill_(math.nan)
        weights = {k: buffer.master.clone() for k, buffer in trainer.buffers.items()}
        with pytest.raises(NotANumberError) as caught:
            trainer.step()
        for k, buffer in trainer.buffers.items():
            same = torch.equal(buffer.master.nan_to_num(9.0), weights[k].nan_to_num(9.0))
            assert same, "weights were touched"
        return str(caught.value)

    wanted = f"step 1: the output of layer {layer} is not finite on rank {rank}, the first"
    for said in run_as_threads(5, body):
        assert said.startswith(wanted)


def test_non_finite_gradient_names_its_layer():
    job = small_job(tied=False, skip_nonfinite=0)

    def body(transport):
        trainer = RankTrainer(job, alone(job), 0, transport, SomeLabels(job))
        parameter = trainer.buffers[2].parameters[0]
        parameter.register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(NotANumberError, match="the gradient of layer 2 is not finite"):
            trainer.step()

    run_as_threads(1, body)


def test_error_says_that_a_non_finite_loss_did_not_repeat(monkeypatch):
    job, cast = small_job(tied=False, skip_nonfinite=0), StepVote.cast

    def infinite(*about):
        return replace(cast(*about), loss_sum=math.inf)

    monkeypatch.setattr(StepVote, "cast", infinite)

    def body(transport):
        trainer = RankTrainer(job, alone(job), 0, transport, SomeLabels(job))
        with pytest.raises(NotANumberError, match="step 0: the loss is not finite, though every"):
            trainer.step()

    run_as_threads(1, body)


# -- steps that are skipped -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_non_finite_steps_are_skipped_alike_by_all_ranks(zero):
    job, data = image_job(zero=zero), BadImages({1, 2})
    run = trained(job, MIXED, steps=4, data=data)
    assert run.disagreements == []
    assert [report.skipped for report in run.reports] == [False, True, True, False]
    assert [report.skipped_steps for report in run.reports] == [0, 1, 2, 2]
    assert math.isfinite(run.reports[3].loss)
    progress = run.trainers[0].progress
    assert (progress.step, progress.updates, progress.samples) == (4, 2, 4 * job.global_batch)
    assert progress.nonfinite == 0
    # A skipped step leaves the weights as they are.
    before, after = (trained(job, MIXED, steps=n, data=data).state for n in (1, 3))
    for key, values in before.items():
        assert key[2] == "gradient" or torch.equal(values, after[key]), key


def test_too_many_non_finite_steps_in_a_row_end_the_run():
    job = image_job(skip_nonfinite=2)

    def body(transport):
        data = BadImages({0, 1, 3, 4, 5})
        trainer = RankTrainer(job, MIXED, transport.rank, transport, data)
        for _ in range(5):
            trainer.step()
        assert (trainer.progress.updates, trainer.progress.nonfinite) == (1, 2)
        # The count goes along when another plan continues.
        saved = saved_progress(trainer.progress)
        assert progress_from(saved) == trainer.progress
        with pytest.raises(NotANumberError) as caught:
            trainer.step()
        return str(caught.value)

    for said in run_as_threads(MIXED.device_count, body):
        assert said.startswith("step 5: the output of layer 0 is not finite on rank")
        assert said.endswith("so were 2 steps before, whose updates were skipped")


def test_overflows_that_a_smaller_scale_may_cure_do_not_count():
    job = image_job(precision="fp16", skip_nonfinite=1)

    def body(transport):
        data = BadImages(range(9))
        trainer = RankTrainer(job, alone(job), 0, transport, data)
        trainer.progress = TrainingProgress(scale=LossScale(4.0))
        for _ in range(3):
            trainer.step()
        assert trainer.progress.nonfinite == 1
        with pytest.raises(NotANumberError):
            trainer.step()

    run_as_threads(1, body)


def test_progress_saved_without_the_count_is_read():
    saved = asdict(saved_progress(TrainingProgress(step=3)))
    del saved["nonfinite"]
    assert progress_from(SavedProgress(**saved)) == TrainingProgress(step=3)
    assert progress_of({**saved, "new": 1}) == SavedProgress(**saved), "of a newer version"


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "sequence"), [(8, 6), (1024, 2048), (4096, 8192)])
def test_first_loss_scale_grows_with_the_batch(batch, sequence):
    """Divided by the tokens of a large batch, a fixed one underflows the gradients of fp16."""
    job = small_job(precision="fp16", global_batch=batch, sequence=sequence)
    seed = loss_factor(job, formats_of(job), LossScale.first(formats_of(job), job))
    assert 4.0 <= seed < 8.0
    assert LossScale.first(FP64, job) == LossScale(1.0)
