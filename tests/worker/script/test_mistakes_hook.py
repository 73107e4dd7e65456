"""A user's mistake in a script that runs alone is one message; everything else is as in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MISTAKE = "error: Trainer: needs a batch_size; give that of all GPUs\n  in train.py:5 in begin\n"
SCRIPT = """\
import sailor
from simulator.documents.problems import InputError, Problem

def begin():
    raise InputError(Problem("Trainer", "needs a batch_size", "give that of all GPUs"))
"""
REAL = """\
import sailor
import torch

def begin():
    return sailor.Trainer(torch.nn.Linear(1, 1), [1.0], steps=1)
"""


def run(folder: Path, end: str, *options: str, given: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT + end)
    words = [sys.executable, *options, "train.py"]
    return subprocess.run(
        words, cwd=folder, input=given, capture_output=True, text=True, check=False
    )


def test_a_mistake_is_one_message_with_the_line_of_the_script(tmp_path):
    done = run(tmp_path, "begin()\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", MISTAKE)


@pytest.mark.slow
def test_a_mistake_in_the_arguments_of_the_trainer_is_one_message(tmp_path):
    (tmp_path / "train.py").write_text(f"{REAL}begin()\n")
    words = [sys.executable, "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, MISTAKE)


def test_a_script_may_catch_its_mistake(tmp_path):
    done = run(tmp_path, "try:\n    begin()\nexcept ValueError as error:\n    print(error)\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Trainer: needs a batch_size; give that of all GPUs\n"


def test_another_error_has_its_trace_and_goes_to_the_hook_that_was_there(tmp_path):
    done = run(tmp_path, "raise KeyError('x')\n")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("KeyError: 'x'\n")
    own = "import sys\nsys.excepthook = lambda *_: print('mine')\n"
    hooked = run(tmp_path, "raise KeyError('x')\n", "-c", f"{own}import runpy, sys\n"
                 "sys.path.insert(0, '.')\nrunpy.run_path('train.py')")  # fmt: skip
    assert hooked.stdout == "mine\n"


def test_a_session_goes_on_after_a_mistake(tmp_path):
    done = run(tmp_path, "", "-i", given="begin()\nprint('goes on')\n")
    assert "error: Trainer: needs a batch_size" in done.stderr
    assert "Traceback" not in done.stderr
    assert "goes on" in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
def test_pytest_sees_the_exception(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import pytest\nimport train\n\ndef test_own():\n"
        "    with pytest.raises(ValueError, match='needs a batch_size'):\n        train.begin()\n"
    )
    run(tmp_path, "")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


def test_a_warning_that_peft_causes_is_not_shown(tmp_path):
    told = "`is_gradient_checkpointing` is deprecated and will be removed in v6."
    ends = (f'import warnings\nwarnings.warn("{told}", FutureWarning)\n', "1 + 1\n")
    assert [run(tmp_path, end).stderr for end in ends] == ["", ""]
