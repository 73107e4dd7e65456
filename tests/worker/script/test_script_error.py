"""What a user reads of an exception in a script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from simulator.documents.problems import InputError
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.script.load import load_script
from worker.script.script_error import script_line, script_traceback, sentence

HERE = Path(__file__)


def line_of(text: str) -> int:
    lines = HERE.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip() == text)


class Damaged:
    """A data set with a sample that raises."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise ValueError("bad")


def raised(act) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any of them
        act()
    return caught.value


def test_sailors_frames_are_left_out_and_the_scripts_are_not(monkeypatch):
    monkeypatch.chdir(HERE.parent)
    data = MapData(Damaged(), default_collate, global_batch=1, seed=0, shuffled=False)
    error = raised(lambda: data.batch(0, [0]))
    line = line_of('raise ValueError("bad")')
    place = f"{HERE.name}:{line} in __getitem__"
    assert script_line(error) == place
    sample = "in dataset: sample 0 (step 0, position 0)"
    assert sentence(error) == f"ValueError: bad ({place}, {sample})"
    told = script_traceback(error)
    assert "map_dataset" not in told
    assert f'File "{HERE}"' in told
    assert told.endswith("ValueError: bad\nin dataset: sample 0 (step 0, position 0)\n")


def test_librarys_frames_below_the_scripts_stay():
    error = raised(lambda: nn.Linear(2, 2)(torch.ones(3)))
    assert "torch/nn/modules/linear.py" in script_traceback(error)
    assert sentence(error).startswith("RuntimeError: ")
    assert "\n" not in sentence(error)
    assert f"{HERE.name}:" in sentence(error)


def test_an_error_without_a_scripts_part_keeps_all_frames():
    error = _ours()
    assert script_line(error) is None
    assert "load.py" in script_traceback(error)


def _ours() -> BaseException:
    """An error of which only Sailor's frames are left."""
    error = raised(lambda: load_script(Path("/nowhere/train.py")))
    assert isinstance(error, InputError)
    trace = error.__traceback__
    while trace is not None and "load.py" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return error.with_traceback(trace)


def test_a_script_that_fails_before_train_names_the_line_of_its_own_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_part.py").write_text("def make():\n    return 1 / 0\n")
    (tmp_path / "train.py").write_text("import own_part\nown_part.make()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as refused:
        load_script(Path("train.py"))
    (problem,) = refused.value.problems
    assert problem.place == "own_part.py:2 in make"
    assert problem.what == "ZeroDivisionError: division by zero"
    told = script_traceback(refused.value.__cause__)
    assert 'File "train.py", line 2' in told
    assert "runpy" not in told


@pytest.mark.parametrize(
    "text",
    [
        'import os\nprint(os.environ["LOCAL_RANK"])\n',
        'import torch.distributed as dist\ndist.init_process_group("gloo")\n',
    ],
)
def test_a_script_that_torchrun_should_start_is_told_what_to_leave_out(tmp_path, monkeypatch, text):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(InputError, match=r"leave out the process group .*from-torchrun\.md"):
        load_script(tmp_path / "train.py")
