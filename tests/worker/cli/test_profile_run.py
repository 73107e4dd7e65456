"""``profile`` measures models of job files and scripts on the CPU, and keeps what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sailord.cli.main import main
from simulator.documents.files import load_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.profile import Profile
from simulator.layer_costs.profile_file import read_profile
from tests.worker.hf_families import save_small_job
from tests.worker.small_run import write
from worker.cli.profile_run import ProfileOptions, ProgressLine, profile
from worker.layer_profiles import device_users
from worker.layer_profiles.measure import LayerFigures

OPTIONS = ProfileOptions(
    job=Path(),
    tp=(1,),
    micro_batches=(1, 2),
    out=Path(),
    name=None,
    device="cpu",
    kind=None,
    catalogue=None,
    budget=60.0,
    threads=None,
    force=True,
)


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., Profile]:
    """Profile the job of a file in the folder, and read the file that this writes."""

    def run(job: str = "job.toml", **more: object) -> Profile:
        options = replace(OPTIONS, job=tmp_path / job, out=tmp_path / "profiles", **more)
        profile(options)
        (path,) = (tmp_path / "profiles").glob("*")
        return read_profile(load_document(path), catalogue=load_catalogue())

    return run


@pytest.mark.slow
def test_a_job_file_is_measured_and_the_next_line_says_how_to_plan_with_it(
    profiled: Callable[..., Profile], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    found = profiled(tp=(1, 2))
    assert (found.name, found.precision, found.is_own) == ("gpt2", "fp32", True)
    assert sorted(found.timings) == [("cpu", tp, b) for tp in (1, 2) for b in (1, 2)]
    timing = found.timings["cpu", 2, 1]
    assert timing.measurement is not None
    assert timing.measurement.torch == torch.__version__
    assert (timing.forward_s > 0).all()
    said = capfd.readouterr()
    assert said.out.endswith(f"to plan with it: --profiles {tmp_path / 'profiles'}\n")
    assert "cpu TP 1 micro batch 2: " in said.err


def test_a_second_run_adds_to_the_file(profiled: Callable[..., Profile], tmp_path: Path) -> None:
    write(tmp_path)
    profiled(micro_batches=(1,))
    found = profiled(micro_batches=(4,), kind="a100-40")
    assert sorted(found.timings) == [("A100-40", 1, 4), ("cpu", 1, 1)]


def test_a_file_of_another_model_is_left_as_it_was(
    profiled: Callable[..., Profile], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    profiled(micro_batches=(1,), name="same")
    assert 'and profile = "same" in [model]' in capfd.readouterr().out
    before = (tmp_path / "profiles" / "profiles_same.json").read_bytes()
    write(tmp_path, change=("layers = 2", "layers = 3"))
    with pytest.raises(InputError, match="other layers"):
        profiled(name="same")
    assert (tmp_path / "profiles" / "profiles_same.json").read_bytes() == before


@pytest.mark.slow
def test_a_model_of_transformers_is_measured(
    profiled: Callable[..., Profile], tmp_path: Path
) -> None:
    save_small_job(tmp_path)
    (tmp_path / "job.toml").write_text(
        '[model]\nhf = "llama"\n[training]\nglobal_batch = 8\nsequence = 12\n'
        'precision = "bf16"\nmax_tp = 2\n[data]\ntokens = "tokens.npy"\n'
    )
    found = profiled(tp=(1, 2), micro_batches=(2,))
    assert found.precision == "bf16"
    assert len(found.layer_names) == 4
    for timing in found.timings.values():
        assert timing.kept_bytes is not None
        assert (timing.kept_bytes[1:] > 0).all()
        assert timing.optimizer_s is not None


SCRIPT = """
import torch
from torch import nn
import sailor

blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
model = nn.Sequential(nn.Linear(4, 8), blocks, nn.Linear(8, 3))
data = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(5)]
sailor.Trainer(
    model,
    data,
    batch_size=16,
    steps=2,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    name="my model",
).train()
"""


def test_a_script_is_measured_beyond_the_end_of_its_data(
    profiled: Callable[..., Profile], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = profiled("train.py", micro_batches=(8,))
    assert found.name == "my-model"
    assert len(found.layer_names) == 5


def test_where_nothing_can_be_written_nothing_is_measured(
    profiled: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(
        "worker.cli.profile_run.profile_job", lambda *_, **__: pytest.fail("it ran")
    )
    with pytest.raises(InputError, match=r"is not the name of a file; use .* such as b"):
        profiled(name="../b")
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(InputError, match="cannot be made: File exists"):
        profiled()
    (tmp_path / "profiles").unlink()
    (tmp_path / "profiles").mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="Permission denied"):
        profiled()


def test_a_damaged_profile_is_not_overwritten(
    profiled: Callable[..., Profile], tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "profiles_gpt2.json").write_text('{"sailor_profile": 1')
    with pytest.raises(InputError, match=r"profiles_gpt2.json"):
        profiled()
    assert (tmp_path / "profiles" / "profiles_gpt2.json").read_text() == '{"sailor_profile": 1'


def test_a_device_in_use_is_refused(
    profiled: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    # Others may train here.
    monkeypatch.setattr(device_users, "training_workers", lambda: iter(()))
    monkeypatch.setattr("os.getloadavg", lambda: (1e9, 0.0, 0.0))
    with pytest.raises(InputError, match=r"is in use by a load of .*--force"):
        profiled(force=False)
    assert not (tmp_path / "profiles").exists()


def test_a_terminal_sees_one_changing_line(capsys: pytest.CaptureFixture[str]) -> None:
    some = LayerFigures((1.0,), (2.0,), (0.0,), (0.0,), 0.25, 9, (0.0,), (0.0,), (1,), (1,))
    for is_terminal, shown in ((True, "\rit: 3 rounds\033[K\r"), (False, " ")):
        progress = ProgressLine(is_terminal)
        progress.sampling("it", 3)
        progress.finished("it", some)
        said = capsys.readouterr().err
        assert said.startswith(shown)
        assert "it: 3000.00 ms for 1 distinct layers, spread 25.0%, 9 rounds" in said


@pytest.mark.slow
def test_sailorctl_measures_plans_and_simulates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    job, out = str(tmp_path / "job.toml"), str(tmp_path / "profiles")
    (tmp_path / "cluster.toml").write_text(
        '[[pool]]\nzone = "us-central1-a"\ngpu = "cpu"\ngpus_per_machine = 2\ngpus = 2\n'
    )
    words = ["profile", "model", job, "--out", out, "--force", "--device", "cpu"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, capfd.readouterr().err
    assert json.loads((tmp_path / "profiles" / "profiles_gpt2.json").read_text())["timings"]
    planned = CliRunner().invoke(
        main, ["plan", job, str(tmp_path / "cluster.toml"), "--profiles", out, "--json"]
    )
    assert planned.exit_code == 0, planned.output
    # Overheads of this platform are assumed, so its error bar is wide, but the layers are known.
    assert "computed, not measured" not in planned.output
