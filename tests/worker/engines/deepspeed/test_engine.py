"""The deepspeed engine matches the sailor engine on plans whose pipelines are alike."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.worker.small_run import run, stage, write

ALIKE = {"micro_batches": 2, "stages": [stage(0, 1), stage(1, 4)]}
WHOLE = {"micro_batches": 4, "stages": [stage(0, 4)]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path)
    give_plan(tmp_path, ALIKE, ALIKE)
    return tmp_path


def give_plan(folder: Path, *pipelines) -> None:
    plan = {"micro_batch_size": 2, "pipelines": list(pipelines)}
    (folder / "plan.json").write_text(json.dumps(plan))


def both(warm, files: Path, *args):
    """Run the job with both engines; DeepSpeed writes to stderr at start."""
    runs = [
        run(warm, files, "--engine", engine, "--save", files / engine, *args)
        for engine in ("sailor", "deepspeed")
    ]
    for done in runs:
        assert done.code == 0, done.err
    return runs


def check_steps(ours, theirs):
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert other["sample_hash"] == mine["sample_hash"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelines", "cut"),
    [
        pytest.param(1, [1], marks=pytest.mark.at_length),
        pytest.param(2, [], marks=pytest.mark.at_length),
        (2, [1]),
    ],
    ids=str,
)
def test_twenty_steps_with_clipping_match_the_sailor_engine(warm, files, pipelines, cut):
    # The norm starts at 1, half of it from the first stage, which DeepSpeed alone would miss.
    write(files, change=("steps = 3", "steps = 20\nclip_norm = 0.5"))
    bounds = [0, *cut, 4]
    stages = [stage(*part) for part in itertools.pairwise(bounds)]
    give_plan(files, *[{"micro_batches": 4 // pipelines, "stages": stages}] * pipelines)
    ours, theirs = both(warm, files)
    assert len(ours.steps) == 20
    check_steps(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "tied apart",
        *(pytest.param(each, marks=pytest.mark.at_length) for each in ("dropout", "zero")),
        "tied in one stage",
    ],
)
def test_losses_samples_and_weights_match_the_sailor_engine(warm, files, case):
    if case == "tied in one stage":
        # Two replicas of the whole model: both uses of the tied tensor are in one stage.
        give_plan(
            files, {"micro_batches": 2, "stages": [stage(0, 4)]}, WHOLE | {"micro_batches": 2}
        )
    elif case != "tied apart":
        added = {"dropout": "dropout = 0.2", "zero": "zero = 1"}[case]
        write(files, change=("steps = 3", f"steps = 3\n{added}"))
        give_plan(files, ALIKE, ALIKE)
    ours, theirs = both(warm, files)
    check_steps(ours, theirs)
    weights = [load_file(files / name / "model.safetensors") for name in ("sailor", "deepspeed")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert tensor.shape == weights[1][name].shape
        # Adam's first steps amplify differences of gradients that are nearly 0.
        assert (tensor - weights[1][name]).abs().max() < 2e-3, name


@pytest.mark.slow
def test_a_users_configuration_is_honoured(warm, files):
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    (files / "ds.json").write_text(json.dumps({"optimizer": optimizer}))
    saved = []
    for steps in ("1", "2"):
        args = ["--engine", "deepspeed", "--deepspeed-config", files / "ds.json"]
        done = run(warm, files, *args, "--steps", steps, "--save", files / steps)
        assert done.code == 0, done.err
        saved.append(load_file(files / steps / "model.safetensors"))
    assert all(bool((saved[0][name] == saved[1][name]).all()) for name in saved[0])


def test_unsupported_plans_are_refused(warm, files):
    uneven = {"micro_batches": 1, "stages": [stage(0, 4, tp=2, recompute="full")]}
    give_plan(files, {**ALIKE, "micro_batches": 3}, uneven)
    done = run(warm, files, "--engine", "deepspeed", "--timeline", files / "t.json")
    assert done.code == 2
    for told in (
        "pipelines differ: pipeline 1 has 1 micro batches and pipeline 0 has 3",
        "TP degrees above 1",
        "recomputes",
        "--timeline: ",
    ):
        assert told in done.err


def test_contradictions_between_configuration_and_job_are_named(warm, files):
    wrong = {"train_batch_size": 7, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (files / "ds.json").write_text(json.dumps(wrong | {"fp16": True}))
    config = ["--deepspeed-config", files / "ds.json"]
    done = run(warm, files, "--engine", "deepspeed", *config)
    assert done.code == 2
    for told in (
        "train_batch_size is 7, but the plan says 8; leave it out",
        "zero_optimization.stage is 3, but the job's zero is 0; pipelines go with 0 or 1",
        "bf16.enabled is True, but the job's precision is fp32; make them agree",
        "fp16 is True; it must be an object",
    ):
        assert told in done.err
    assert "give --engine deepspeed" in run(warm, files, *config).err


def test_unknown_optimizers_and_schedulers_are_reported_before_any_rank_starts(warm, files):
    wrong = {
        "optimizer": {"type": "Adan"},
        "scheduler": {"type": "Warmup"},
        "gradient_clipping": 7.0,
    }
    (files / "ds.json").write_text(json.dumps(wrong))
    done = run(warm, files, "--engine", "deepspeed", "--deepspeed-config", files / "ds.json")
    assert done.code == 2
    assert "optimizer.type is 'Adan', which DeepSpeed does not have; did you mean" in done.err
    assert "scheduler.type is 'Warmup', which DeepSpeed does not have; did you mean" in done.err
    assert "gradient_clipping is 7.0, but the job has" in done.err


@pytest.mark.slow
def test_configuration_rejected_by_deepspeed_is_reported_without_a_stack_trace(warm, files):
    (files / "ds.json").write_text('{"zero_optimization": {"stage": 1, "foo": 2}}')
    done = run(warm, files, "--engine", "deepspeed", "--deepspeed-config", files / "ds.json")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "DeepSpeed rejects its configuration: 1 validation error" in done.err
    assert "foo Extra inputs are not permitted" in done.err.splitlines()[-1]


@pytest.mark.at_length
def test_auto_settings_follow_the_job(warm, files):
    parameters = {"lr": "auto", "betas": "auto"}
    left_open = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "Adam", "params": parameters},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    }
    (files / "ds.json").write_text(json.dumps(left_open))
    write(files, change=("steps = 3", 'steps = 3\noptimizer = "adam"\nschedule = "linear"'))
    give_plan(files, ALIKE, ALIKE)
    ours = run(warm, files)
    theirs = run(warm, files, "--engine", "deepspeed", "--deepspeed-config", files / "ds.json")
    assert theirs.code == 0, theirs.err
    check_steps(ours, theirs)


def test_fp16_on_cpus_is_refused_before_any_rank_starts(warm, files):
    write(files, change=('"fp32"', '"fp16"'))
    give_plan(files, ALIKE, ALIKE)
    done = run(warm, files, "--engine", "deepspeed", "--device", "cpu")
    assert done.code == 2
    assert "[training] precision: is fp16, which DeepSpeed does not have on CPUs" in done.err


@pytest.mark.slow
def test_bf16_is_close_to_the_sailor_engine(warm, files):
    write(files, change=('"fp32"', '"bf16"'))
    give_plan(files, ALIKE, ALIKE)
    ours, theirs = both(warm, files)
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-3)
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=2e-2)


@pytest.mark.slow
def test_non_finite_loss_ends_the_run(warm, files):
    write(files, change=("learning_rate = 0.01", "learning_rate = 1e30\nskip_nonfinite = 0"))
    give_plan(files, ALIKE, ALIKE)
    ended = [run(warm, files, "--engine", engine) for engine in ("sailor", "deepspeed")]
    assert [done.code for done in ended] == [1, 1]
    ours, theirs = [done.err.splitlines()[-1] for done in ended]
    assert theirs == ours
    assert "step 1: the output of layer 1 is not finite on rank 1" in theirs


@pytest.mark.slow
def test_killed_rank_ends_the_run(warm, files):
    done = run(warm, files, "--engine", "deepspeed", SAILOR_FAIL_AT="2:step:1")
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("error: rank 2 was killed by SIGKILL in the optimizer step of step 1")
