"""A checkpoint of four uneven pipelines is bit-equal for every reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sailord.planning.job_spec import read_job
from simulator.spec.job import Job
from tests.fakes.object_stores import object_stores
from tests.sailord.checkpoints.committed import commit
from tests.sailord.checkpoints.made import SPEC
from tests.worker.checkpoint.snapshot_runs import Generation, on_nodes, state_only, train
from tests.worker.engine_runs import state_of
from tests.worker.engine_runs import train as train_by
from tests.worker.rank_processes import as_processes
from tests.worker.training_runs import alone, drawn, plan_of
from worker.checkpoint.by_tensor.resume import open_resume_point
from worker.checkpoint.by_tensor.saved_state import open_saved_state
from worker.checkpoint.other_formats.convert import export_deepspeed
from worker.checkpoint.piece_sources import DurableSource

ROOT = Path(__file__).resolve().parents[4]
GPT = SPEC.replace("max_tp = 2", "max_tp = 4")
LLAMA = GPT.replace('"gpt2"', '"llama"').replace("heads = 4", "heads = 4\nkv_heads = 2\nffn = 32")
SPECS = {"gpt2": GPT, "llama": LLAMA, "zero": GPT + "zero = 1\n"}

FOUR = plan_of(
    1,
    (3, [(0, 2, 2), (2, 4, 1)]),
    (2, [(0, 1, 1), (1, 4, 4)]),
    (2, [(0, 4, 1)]),
    (1, [(0, 3, 4), (3, 4, 2)]),
)
OTHER = plan_of(2, (3, [(0, 1, 4), (1, 3, 1), (3, 4, 2)]), (1, [(0, 3, 2), (3, 4, 1)]))
ALIKE = plan_of(2, (2, [(0, 1, 1), (1, 4, 1)]), (2, [(0, 1, 1), (1, 4, 1)]))


def written(folder: Path, name: str, uri: str | None = None) -> tuple[Job, Generation, str]:
    """Two steps under four pipelines, committed: the job, what it came to, the manifest."""
    job = read_job(SPECS[name])
    before = train(job, on_nodes(FOUR, drawn(name)), folder, number=1, steps=2)
    return job, before, commit(folder, before, SPECS[name], uri or f"file://{folder}/kept")


def check(state, before: Generation) -> None:
    expected = state_only(before)
    kinds = {kind for _, _, kind in expected}
    assert kinds == {"master", "moment 0", "moment 1"}
    for key, values in expected.items():
        assert torch.equal(torch.as_tensor(state[key]), values), key


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_one_process_and_another_plan_read_every_bit(tmp_path, name):
    job, before, manifest = written(tmp_path, name)
    check(open_resume_point(manifest, job).logical, before)
    for number, shape in enumerate((alone(job), OTHER), start=2):
        plan = on_nodes(shape, drawn("elsewhere"))
        source = [DurableSource(manifest)]
        after = train(job, plan, tmp_path, number=number, steps=0, after=before, sources=source)
        assert after.step == 2
        check(after.state, before)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_ranks_and_converters_read_every_bit_from_a_bucket(tmp_path, scheme):
    with object_stores():
        job, before, manifest = written(tmp_path, "gpt2", f"{scheme}://bucket/{tmp_path.name}")
        check(open_resume_point(manifest.rpartition("/")[0], job).logical, before)
        assert open_saved_state(manifest).progress.step == 2
        plan, source = on_nodes(OTHER, drawn("elsewhere")), [DurableSource(manifest)]
        after = train(job, plan, tmp_path, number=2, steps=0, after=before, sources=source)
        check(after.state, before)


@pytest.mark.slow
def test_deepspeeds_ranks_read_every_bit(tmp_path):
    """Two stages of two pipelines, which divide masters and moments among them (ZeRO-1)."""
    job, before, manifest = written(tmp_path, "zero")
    begin = open_resume_point(manifest, job)
    arrays = {key: values.numpy() for key, values in begin.logical.items()}
    arguments = ("deepspeed", job, ALIKE, 0, (arrays, begin.progress))
    results = as_processes(tmp_path, ALIKE.device_count, train_by, *arguments)
    state, progress = state_of(job, results)
    assert (progress.step, progress.samples) == (2, 16)
    check(state, before)


@pytest.mark.at_length
def test_deepspeeds_own_loader_reads_every_bit(tmp_path):
    _, _, manifest = written(tmp_path, "gpt2")
    export_deepspeed(open_saved_state(manifest), tmp_path / "ds")
    script = [sys.executable, "-m", "tests.worker.checkpoint.other_formats.deepspeed_reads"]
    done = subprocess.run(
        [*script, str(tmp_path / "ds"), manifest],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tensors are equal" in done.stdout
