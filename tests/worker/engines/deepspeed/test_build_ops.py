"""DeepSpeed's C++ extensions: which configurations need one, and who compiles it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from simulator.documents.problems import InputError
from tests.worker.small_run import run, write
from worker.engines.deepspeed import build_ops
from worker.engines.deepspeed.build_ops import load_ops, ops_needed, use_extensions_folder

VARIABLE = "TORCH_EXTENSIONS_DIR"
TOOLS = str(Path(sys.executable).parent)


class Builder:
    """Stands for DeepSpeed's builder: compiles if nothing is there, as torch does."""

    name = "fused_adam"

    def __init__(self, folder: Path, meanwhile: threading.Event) -> None:
        self.target = folder / self.name / f"{self.name}.so"
        self.meanwhile = meanwhile
        self.compiled = 0

    def load(self, *, verbose: bool) -> None:
        assert not verbose
        if not self.target.exists():
            self.compiled += 1
            self.meanwhile.wait(10)
            self.target.parent.mkdir(exist_ok=True)
            self.target.touch()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for extensions that the user has named."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # Restored after the test.
    return tmp_path


@pytest.fixture
def builder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder(folder, threading.Event())
    monkeypatch.setattr(build_ops, "_builder", lambda _: made)
    monkeypatch.setattr(build_ops.shutil, "which", lambda name: f"/usr/bin/{name}")
    return made


@pytest.mark.parametrize(
    ("optimizer", "offload", "needed"),
    [
        ({"type": "SGD"}, "none", ()),
        ({"type": "Adam", "params": {"torch_adam": True}}, "cpu", ()),
        ({"type": "AdamW", "params": {}}, "none", ("FusedAdamBuilder",)),
        ({"type": "adam"}, "cpu", ("CPUAdamBuilder",)),
        ({"type": "Lion"}, "none", ("FusedLionBuilder",)),
        ({"type": "Adagrad"}, "none", ()),
    ],
)
def test_only_deepspeeds_own_optimizers_need_an_extension(optimizer, offload, needed):
    zero = {"offload_optimizer": {"device": offload}}
    assert ops_needed({"optimizer": optimizer, "zero_optimization": zero}) == needed


def test_one_process_compiles_and_says_so_while_the_others_wait(builder, folder, capfd):
    def second() -> None:
        builder.meanwhile.set()
        load_ops(["FusedAdamBuilder"])

    threads = [threading.Thread(target=load_ops, args=(["FusedAdamBuilder"],))]
    threads.append(threading.Thread(target=second))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert builder.compiled == 1
    assert capfd.readouterr().err == (
        "compiling DeepSpeed's C++ extension fused_adam, which takes one to three minutes; "
        f"it is kept in {folder / 'fused_adam'}\n"
    )


def test_a_lock_that_a_killed_build_left_behind_is_removed(builder, folder):
    builder.meanwhile.set()
    stale = folder / "fused_adam" / "lock"
    stale.parent.mkdir()
    stale.touch()
    load_ops(["FusedAdamBuilder"])
    assert not stale.exists()


def test_a_missing_compiler_is_an_error_with_place_cause_and_cure(builder, monkeypatch):
    monkeypatch.setattr(build_ops.shutil, "which", lambda _: None)
    with pytest.raises(InputError) as raised:
        load_ops(["FusedAdamBuilder"])
    (problem,) = raised.value.problems
    assert problem.place == "DeepSpeed's C++ extension fused_adam"
    assert "there is no C++ compiler (c++)" in problem.what
    assert "apt-get install g++" in problem.cure
    assert builder.compiled == 0


def test_a_failed_build_names_the_extension(builder, monkeypatch):
    def fail(*, verbose: bool) -> None:
        raise RuntimeError(f"Error building extension 'fused_adam'\nverbose {verbose}")

    monkeypatch.setattr(builder, "load", fail)
    with pytest.raises(InputError, match="fused_adam: Error building extension 'fused_adam'; "):
        load_ops(["FusedAdamBuilder"])


def test_an_uncreatable_folder_falls_back_to_torchs_own(folder, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    (folder / "file").touch()
    assert use_extensions_folder(folder / "file" / "below") is None
    assert VARIABLE not in os.environ


def test_ninja_beside_python_is_found(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    assert use_extensions_folder() == folder
    assert os.environ["PATH"].split(os.pathsep) == [TOOLS, "/usr/bin"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sailor", "deepspeed"])
def test_training_without_deepspeeds_optimizers_needs_no_compiler(warm, tmp_path, engine):
    write(tmp_path)
    done = run(
        warm,
        tmp_path,
        "--engine",
        engine,
        plan=False,
        PATH=TOOLS,
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert done.code == 0, done.err
    assert not list(tmp_path.glob("*/*.so"))


@pytest.mark.slow
def test_deepspeeds_optimizers_without_a_compiler_are_refused(warm, tmp_path):
    write(tmp_path)
    optimizer = {"type": "Adam", "params": {"torch_adam": False}}
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": optimizer}))
    config = ["--engine", "deepspeed", "--deepspeed-config", tmp_path / "ds.json"]
    done = run(warm, tmp_path, *config, plan=False, PATH=TOOLS, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.code == 2, done.err
    assert "must be compiled for this optimizer, and there is no C++ compiler" in done.err
    assert "Traceback" not in done.err
