"""``python -m worker`` as scripts and people use it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.worker.small_run import PLAN, run, stage, write

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def files(tmp_path):
    """A job and a plan in a folder."""
    write(tmp_path)
    return tmp_path


def refusal(done) -> str:
    assert done.code == 2, done.err
    assert done.out == ""
    return done.err


# -- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_step_prints_a_line_and_losses_do_not_depend_on_the_plan(warm, files):
    alone, many = run(warm, files, plan=False), run(warm, files)
    assert (alone.code, many.code) == (0, 0), many.err
    for one, other in zip(alone.steps, many.steps, strict=True):
        # A step of a millisecond may wait for its samples for some of it.
        assert set(one) - {"data_wait_s"} == {
            *("step", "loss", "grad_norm", "learning_rate", "samples", "seconds", "sample_hash"),
            *("samples_per_s", "tokens_per_s", "skipped_steps"),
        }
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert (other["samples"], other["sample_hash"]) == (8, one["sample_hash"])
    assert [step["step"] for step in many.steps] == [0, 1, 2]
    assert len({step["sample_hash"] for step in many.steps}) == 3


@pytest.mark.slow
def test_exact_model_is_bit_equal_under_both_plans(warm, files):
    write(files, family="exact")
    results = []
    for plan in (False, True):
        done = run(warm, files, "--save", files / f"{plan}", plan=plan)
        assert done.code == 0, done.err
        results.append([(step["loss"], step["grad_norm"]) for step in done.steps])
    assert results[0] == results[1]
    weights = [load_file(files / f"{plan}" / "model.safetensors") for plan in (False, True)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.slow
def test_repeated_run_prints_the_same_bits(warm, files):
    losses = [[step["loss"] for step in run(warm, files).steps] for _ in range(2)]
    assert losses[0] == losses[1]


def test_weights_are_saved_under_hugging_face_names(warm, files):
    assert run(warm, files, "--save", files / "out", "--steps", "1").code == 0
    weights = load_file(files / "out" / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (64, 16)
    assert weights["transformer.h.1.attn.c_attn.weight"].shape == (16, 48)
    found = {path.name for path in (files / "out").iterdir()}
    assert found == {"config.json", "model.safetensors"}


def test_summary_has_each_ranks_position_and_peak_memory(warm, files):
    (line,) = run(warm, files).err.splitlines()
    ranks = json.loads(line)["ranks"]
    places = [(rank["pipeline"], rank["stage"], rank["tp_index"]) for rank in ranks]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert all(2**20 < rank["peak_memory_bytes"] < 2**30 for rank in ranks)


def test_timeline_has_every_pass_of_every_rank(warm, files):
    assert run(warm, files, "--timeline", files / "t.json").code == 0
    events = json.loads((files / "t.json").read_text())["traceEvents"]
    drawn = [event["name"] for event in events if event["ph"] == "X"]
    # Three steps of five micro batches on three ranks and of three on one.
    for letter in "FB":
        assert sum(name[0] == letter and name[1:].isdigit() for name in drawn) == 3 * (5 * 3 + 3)
    for name in ("optimizer step", "vote", "wait", "sync 0", "step 2", "send 4", "receive 4"):
        assert name in drawn
    assert drawn.count("optimizer step") == 3 * 4


def test_converted_text_can_be_trained_on(warm, files):
    tokenizers = pytest.importorskip("tokenizers")
    (files / "a.txt").write_text("abcdefgh" * 40)
    vocabulary = {letter: i for i, letter in enumerate("abcdefgh")}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    tokenizers.Tokenizer(model).save(str(files / "tokenizer.json"))
    done = warm.run(
        "convert-tokens",
        files / "a.txt",
        "--out",
        files / "c.bin",
        "--tokenizer",
        files / "tokenizer.json",
        "--end-of-text",
        "h",
    )
    assert (done.code, done.out) == (0, f"{files / 'c.bin'}: 321 tokens\n")
    write(files, more='[data]\ntokens = "c.bin"\n')
    done = run(warm, files)
    assert done.code == 0, done.err
    assert done.steps[-1]["loss"] < done.steps[0]["loss"]


def test_default_output_is_text(warm, files):
    done = warm.run("run", "--job", files / "job.toml")
    assert done.code == 0
    assert [line.split()[:3] for line in done.out.splitlines()] == [
        ["step", str(number), "loss"] for number in range(3)
    ]
    assert "peak memory" in done.err


# -- mistakes -------------------------------------------------------------------------------------


def test_a_plan_of_another_model_is_refused(warm, files):
    other = {**PLAN, "pipelines": [{"micro_batches": 8, "stages": [stage(0, 26)]}]}
    (files / "plan.json").write_text(json.dumps(other))
    told = refusal(run(warm, files))
    assert "plan.json: pipelines[0]" in told
    assert "ends beyond the last layer of gpt2; end at 4" in told


def test_a_plan_of_too_many_ranks_is_refused(warm, files):
    told = refusal(run(warm, files, "--ranks-max", "3"))
    assert told == (
        "error: plan.json: needs 4 ranks, more than the 3 allowed; "
        "raise --ranks-max or give a smaller plan\n"
    )


@pytest.mark.slow
def test_invalid_tokens_are_refused_before_any_rank_starts(warm, files):
    write(files, more='[data]\ntokens = "c.bin"\n')
    assert "c.bin: " in refusal(run(warm, files))
    np.save(files / "c.npy", np.arange(100, dtype=np.uint16))
    (files / "c.npy").rename(files / "c.bin")
    assert "token 64 is 64, outside the model's vocabulary of 64" in refusal(run(warm, files))
    (files / "c.bin").write_bytes((files / "c.bin").read_bytes()[:-1])
    assert "truncated" in refusal(run(warm, files))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused(warm, files):
    (files / "closed").mkdir(mode=0o500)
    assert "cannot be written" in refusal(run(warm, files, "--save", files / "closed"))


def test_unwritable_outputs_are_refused_before_any_rank_starts(warm, files):
    for option, place in (("--save", files / "plan.json"), ("--timeline", files / "no" / "t.json")):
        assert f"{place}: cannot be written" in refusal(run(warm, files, option, place))


@pytest.mark.slow
def test_other_input_errors_are_sentences(warm, files):
    write(files, change=("steps = 3\n", ""))
    assert "is missing, and the job has no number of steps" in refusal(run(warm, files))
    write(files, family="exact", change=("vocab = 64", "vocab = 32768"))
    assert "more than sum up exactly" in refusal(run(warm, files))
    write(files)
    if torch.cuda.device_count() < 4:
        assert "4 ranks need as many GPUs" in refusal(run(warm, files, "--device", "cuda"))
    assert "Missing option" in warm.run("run").err


def test_refused_run_keeps_an_older_timeline(warm, files):
    (files / "t.json").write_text("older")
    refusal(run(warm, files, "--timeline", files / "t.json", "--ranks-max", "3"))
    assert (files / "t.json").read_text() == "older"


@pytest.mark.parametrize("text", ["garbage", "4:backward:0", "0:sleep:0", "0:backward:-1", ""])
def test_impossible_fail_points_are_refused(warm, files, text):
    assert f"SAILOR_FAIL_AT: is {text!r}" in refusal(run(warm, files, SAILOR_FAIL_AT=text))


def test_all_input_errors_are_reported_at_once(warm, files):
    write(files, change=("steps = 3\n", ""), more='[data]\ntokens = "c.bin"\n')
    told = refusal(run(warm, files, "--ranks-max", "1", "--save", files / "job.toml"))
    assert [line.split(":")[1].strip() for line in told.splitlines()] == [
        "plan.json",
        "c.bin",
        f"{files / 'job.toml'}",
        "--steps",
    ]


# -- ends -----------------------------------------------------------------------------------------


def test_closed_output_pipe_ends_all_ranks(warm, files):
    command = ["run", "--job", files / "job.toml", "--plan", files / "plan.json", "--json"]
    done = warm.run(*command, "--steps", "1000000", reader_is_gone=True)
    assert (done.code, done.err, done.left) == (128 + signal.SIGPIPE, "", [])


def test_full_disk_is_reported_in_a_sentence_and_costs_no_trained_weights(warm, files):
    more = "--timeline", "/dev/full", "--save", files / "out"
    done = run(warm, files, "--steps", "1", *more)
    said = done.err.splitlines()[-1]
    assert (done.code, said) == (1, "error: /dev/full: cannot be written: No space left on device")
    assert (files / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_full_disk_for_weights_is_reported_in_a_sentence(files):
    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-m", "worker", "run", "--job", files / "job.toml", "--steps", "1"]
    done = subprocess.run(
        [*command, "--plan", files / "plan.json", "--save", files / "out"],
        cwd=ROOT,
        preexec_fn=little_room,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot write its weights to" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((files / "out").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signal_ends_all_ranks(warm, files, number):
    plan = ["--plan", files / "plan.json"]
    pid = warm.start("run", "--job", files / "job.toml", *plan, "--json", "--steps", "1000000")
    warm.wait_for_output()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lives = [os.pidfd_open(int(child)) for child in children]
    assert len(lives) == 4
    os.kill(pid, number)
    done = warm.end()
    if number == signal.SIGKILL:
        assert done.code == -number
    else:
        assert (done.code, done.err) == (128 + number, f"ended by {number.name}\n")
        assert done.left == []
    for life in lives:
        with os.fdopen(life):
            assert select.select([life], [], [], 10.0)[0], "a rank outlived its parent"
