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
import torch

from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.resume import take_in
from sailord.planning.job_spec import read_job
from simulator.documents.files import load_document
from tests.sailord.checkpoints.made import JOB
from worker.checkpoint.by_tensor.piece_blocks import PieceMap
from worker.checkpoint.by_tensor.write_snapshot import write_snapshot
from worker.checkpoint.snapshot_file import SavedProgress, read_header
from worker.models.weight_files.foreign_tensors import whole_tensor

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.slow
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
    folder.mkdir(exist_ok=True)
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


SAMPLED = """
import re, sys, threading
from pathlib import Path
out, found, ended = Path(sys.argv.pop(1)), [], threading.Event()
def sample():
    while not ended.wait(0.002):
        found.append(int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read_text())[1]))
status, thread = Path("/proc/self/status"), threading.Thread(target=sample)
thread.start()
try:
    from worker.cli.main import main
    main.main(sys.argv[1:], standalone_mode=False)
finally:
    ended.set()
    thread.join()
out.write_text(str(max(found)))
"""
"""Memory of its own alone: pages of mapped files can be dropped at any time."""


def peak_of(scratch: Path, *arguments: object, program: str = MEASURED) -> int:
    """Run a command of ``python -m worker``; return the largest resident memory of its process.

    That which ``wait4`` returns may be the parent's.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, scratch / "peak", *map(str, arguments)]
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


HF = """
[model]
hf = "llama"

[training]
global_batch = 4
sequence = 8
precision = "fp32"
max_tp = 1
steps = 3
"""
SCRIPT = """
import sailor, torch
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
sailor.Trainer(sailor.hf("FOLDER/llama"), data, batch_size=4, steps=3).train()
"""


def _stored_hf(folder: Path, *, layers: int, ffn: int) -> Stored:
    transformers = pytest.importorskip("transformers", reason="opens a model of transformers")
    from worker.script.hf_job import described_job  # noqa: PLC0415 - needs transformers
    from worker.script.job_text import described_text  # noqa: PLC0415 - the same

    config = transformers.LlamaConfig(
        **{"vocab_size": 256, "hidden_size": 256, "num_attention_heads": 4},
        **{"intermediate_size": ffn, "num_hidden_layers": layers},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    job = folder.with_suffix(".toml")
    job.write_text(HF.replace("llama", f"{folder}/llama"))
    document = load_document(job)
    text = described_text(document, described_job(document)[0])
    return _stored(folder, text)


@pytest.mark.parametrize(
    "by_script", [False, pytest.param(True, marks=pytest.mark.at_length)], ids=["file", "script"]
)
def test_an_export_with_the_job_keeps_two_tensors_at_most(by_script, tmp_path):
    peaks = []
    for number, (layers, ffn) in enumerate(((2, 256), (3, 16384))):
        each = _stored_hf(tmp_path / f"{number}", layers=layers, ffn=ffn)
        job, out = each.spec, tmp_path / f"out{number}"
        if by_script:
            job = tmp_path / f"{number}.py"
            job.write_text(SCRIPT.replace("FOLDER", str(tmp_path / f"{number}")))
        given = ("export-checkpoint", each.manifest, "--to", out, "--job", job)
        peaks.append(peak_of(tmp_path, *given, program=SAMPLED))
        assert (out / "config.json").exists()
        written = (out / "model.safetensors").stat().st_size
        assert number == 0 or written > 9 * each.largest
    assert peaks[1] - peaks[0] <= 2 * each.largest
