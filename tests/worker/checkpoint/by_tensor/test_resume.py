"""``--resume`` continues from a checkpoint under any plan, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sailord.planning.job_spec import read_job
from tests.sailord.checkpoints.made import FullCheckpoint, Made, flip, make
from tests.worker.small_run import JOB, PLAN, run, stage
from tests.worker.training_runs import alone, trained
from worker.checkpoint.snapshot_file import SavedProgress, read_header
from worker.data.sources.open_data import open_data
from worker.layout.rank_layout import TIED

pytestmark = pytest.mark.slow

SPEC = JOB.replace("FAMILY", "llama").replace("steps = 3", 'steps = 6\nschedule = "cosine"')
SPEC = SPEC.replace("hidden = 16", "hidden = 16\nkv_heads = 2\nffn = 32")
ALIKE = {"micro_batches": 2, "stages": [stage(0, 1), stage(1, 4)]}
PLANS = {"sailor": PLAN, "deepspeed": {"micro_batch_size": 2, "pipelines": [ALIKE, ALIKE]}}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(SPEC)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


def trained_for(steps: int):
    """Return a trainer of one rank after some steps."""
    job = read_job(SPEC)
    return trained(job, alone(job), steps=steps, compare=False, data=open_data(job, Path()))


def checkpoint(folder: Path, steps: int, *, generation: int = 1) -> Made:
    """Commit a checkpoint after some steps."""
    done = trained_for(steps)
    now = done.trainers[0].progress
    progress = SavedProgress(
        now.step, now.updates, 1.0, 0, now.sample_hash, now.samples, now.label_tokens
    )
    kinds = tuple(
        {
            (0 if layer == TIED else layer, name): values
            for (layer, name, each), values in done.state.items()
            if each == kind
        }
        for kind in ("master", "moment 0", "moment 1")
    )
    whole = FullCheckpoint(read_job(SPEC), progress, kinds)
    return make(folder / "kept", steps, spec=SPEC, whole=whole, generation=generation)


@pytest.mark.parametrize("engine", list(PLANS))
def test_resumed_run_matches_an_uninterrupted_one(warm, files, engine):
    made = checkpoint(files, 2)
    expected = trained_for(6).reports[2:]
    (files / "plan.json").write_text(json.dumps(PLANS[engine]))
    # All forms of its name: the job's folder, the point's folder, the manifest.
    folder = files / "kept" / "j"
    named = {"sailor": folder, "deepspeed": made.durable.manifest}[engine]
    done = run(warm, files, "--resume", named, "--engine", engine)
    assert done.code == 0, done.err
    assert [step["step"] for step in done.steps] == [2, 3, 4, 5]
    losses = [report.loss for report in expected]
    assert [step["loss"] for step in done.steps] == pytest.approx(losses, rel=1e-5)
    assert [s["sample_hash"] for s in done.steps] == [r.sample_hash for r in expected]


def test_resume_selects_the_point_and_ends_with_the_job(warm, files):
    checkpoint(files, 2)
    checkpoint(files, 6, generation=2)
    folder = files / "kept" / "j"
    done = run(warm, files, "--resume", folder / "1-2", "--steps", "1")
    assert [step["step"] for step in done.steps] == [2]
    done = run(warm, files, "--resume", folder)
    assert done.code == 2
    assert "the checkpoint is of step 6, and the job ends at step 6; give --steps" in done.err
    done = run(warm, files, "--resume", folder / "1-3")
    assert done.code == 2
    assert "1-3 holds no checkpoint; there are: 2-6, 1-2" in done.err
    done = run(warm, files, "--resume", files / "nowhere")
    assert done.code == 2
    assert "nowhere holds no checkpoint; give a manifest" in done.err


def test_flipped_byte_is_named_with_the_next_older_intact_checkpoint(warm, files):
    made = [checkpoint(files, steps) for steps in (2, 3, 4)]
    for each in made[1:]:
        path = files / "kept" / "j" / f"1-{each.manifest.point.step}" / "1-n1.1.snap"
        piece = next(p for p in read_header(path).pieces if p.bytes)
        flip(path, piece.offset + 3)
    done = run(warm, files, "--resume", files / "kept" / "j")
    assert done.code == 2
    damaged = f"{path}: piece {piece.piece} of layer {piece.layer} is damaged"
    assert f"error: --resume: file://{damaged}" in done.err
    assert f"the next older intact one is {made[0].durable.manifest}" in done.err
    for each in (files / "kept" / "j" / "1-2").glob("*.snap"):
        each.write_bytes(each.read_bytes()[:-100])
    done = run(warm, files, "--resume", made[2].durable.manifest)
    assert f"{damaged}: its checksum does not match; no older one is intact" in done.err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("vocab = 64", "vocab = 32"), "token.weight of layer 0 is (32, 16) and was (64, 16)"),
        (("layers = 2", "layers = 3"), "model was changed since step 2: it has 5 layers and had 4"),
        (("max_tp = 2", "max_tp = 1"), "the model was changed since step 2: max_tp is 1 and was 2"),
        (("steps = 6", 'steps = 6\noptimizer = "sgd"'), "optimizer is sgd and was adamw"),
        (("global_batch = 8", "global_batch = 16"), "made with global_batch = 8, and the job has"),
        (("[training]", "[data]\nseed = 7\n\n[training]"), "made with [data] seed = 0, and the"),
    ],
    ids=lambda given: given[1] if isinstance(given, tuple) else "",
)
def test_another_jobs_checkpoint_is_refused(warm, files, change, told):
    checkpoint(files, 2)
    assert change[0] in SPEC
    (files / "job.toml").write_text(SPEC.replace(*change, 1))
    done = run(warm, files, "--resume", files / "kept" / "j", plan=False)
    assert (done.code, done.out) == (2, "")
    assert told in done.err, done.err
