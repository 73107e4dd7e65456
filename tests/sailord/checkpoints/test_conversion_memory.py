"""A conversion needs the memory of its largest tensors, however large the checkpoint is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="checkpoints are read with torch")

from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.resume import take_in
from sailord.planning.job_spec import read_job
from tests.sailord.checkpoints.made import JOB
from worker.checkpoint.piece_blocks import PieceMap
from worker.checkpoint.snapshot_file import SavedProgress, read_header
from worker.checkpoint.write_snapshot import write_snapshot
from worker.models.weight_files.foreign_tensors import whole_tensor

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SPEC = """
[model]
family = "llama"
layers = LAYERS
hidden = 256
heads = 4
ffn = FFN
vocab = 256
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
"""
SMALL = SPEC.replace("LAYERS", "1").replace("FFN", "256")
LARGE = SPEC.replace("LAYERS", "3").replace("FFN", "16384")
FORMS = (
    "megatron",
    *(pytest.param(x, marks=pytest.mark.at_length) for x in ("huggingface", "dcp", "deepspeed")),
)


@dataclass(frozen=True)
class Stored:
    """A checkpoint, the file from which it was made, and the bytes of its largest tensor."""

    spec: Path
    manifest: str
    file: Path
    largest: int


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a small and a large checkpoint."""
    base = tmp_path_factory.mktemp("stored")
    yield [_stored(base / name, spec) for name, spec in (("small", SMALL), ("large", LARGE))]
    shutil.rmtree(base)


def _stored(folder: Path, spec: str) -> Stored:
    folder.mkdir()
    job = read_job(spec)
    shapes = {key: each.shape for key, (_, each) in PieceMap(job).specs.items()}
    tensors = [whole_tensor("", key, shape) for key, shape in shapes.items()]
    progress = SavedProgress(7, 7, 1.0, 0, "", 56, 448)
    file = folder / "whole.snap"
    write_snapshot(job, progress, tensors, 3, lambda t, _: torch.rand(t.shape), JOB, file)
    durable = take_in(open_storage(f"file://{folder}/kept"), JOB, job, spec, file)
    (folder / "job.toml").write_text(spec)
    return Stored(
        folder / "job.toml", durable.manifest, file, 4 * max(prod(s) for s in shapes.values())
    )


MEASURED = """
import re, sys
from pathlib import Path
from worker.cli.main import main
out = Path(sys.argv.pop(1))
main.main(sys.argv[1:], standalone_mode=False)
status = Path("/proc/self/status").read_text()
out.write_text(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


def peak_of(scratch: Path, *arguments: object) -> int:
    """Run a command of ``python -m worker``; return the largest resident memory of its process.

    That which ``wait4`` returns may be the parent's.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, scratch / "peak", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return int((scratch / "peak").read_text()) * 1024


@pytest.mark.parametrize("form", FORMS)
def test_conversions_keep_two_tensors_at_most_and_every_bit(stored, form, tmp_path):
    peaks = []
    for number, each in enumerate(stored):
        out, back = tmp_path / f"{number}", tmp_path / f"{number}.snap"
        there = peak_of(tmp_path, "export-checkpoint", each.manifest, "--to", out, "--form", form)
        given = ("--job", each.spec, "--name", JOB, "--to", back, "--form", form)
        peaks.append((there, peak_of(tmp_path, "import-checkpoint", out, *given)))
        shutil.rmtree(out)
        header, was = read_header(back), read_header(each.file)
        if form == "huggingface":
            assert header.step == 0
        else:
            assert header.pieces == was.pieces
        back.unlink()
    (small_out, small_in), (large_out, large_in) = peaks
    limit = 2 * stored[1].largest
    assert read_header(stored[1].file).total_bytes > 25 * stored[1].largest
    assert large_out - small_out <= limit, "exporting"
    assert large_in - small_in <= limit, "importing"
