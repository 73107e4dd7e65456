"""Runs a user's script up to its ``train()``, to take what it gives."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from simulator.documents.problems import InputError, Problem, Problems
from worker.script import script_trainer
from worker.script.recipe import Recipe
from worker.script.script_error import PACKAGES, script_line

_OF_TORCHRUN = re.compile(r"\b(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")
"""Variables of the environment that torchrun sets."""


class _TrainCalledError(BaseException):
    """Ends the script at ``train()``, through any ``except Exception`` of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe


class _LastLine:
    """Stands for stderr, and keeps the last line that a script writes there."""

    def __init__(self) -> None:
        self._stream: Any = sys.stderr
        self.text = ""

    def write(self, text: str) -> Any:
        self.text = next((line for line in reversed(text.splitlines()) if line.strip()), self.text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def load_script(path: Path, arguments: Sequence[str] = ()) -> Recipe:
    """Run a script as ``python PATH ARGUMENTS`` would, and return what it would train."""

    def stop(recipe: Recipe) -> NoReturn:
        raise _TrainCalledError(recipe)

    place = str(path)
    if not path.is_file():
        raise InputError(Problem(place, "does not exist", "name a Python script"))
    told: Any = _LastLine()
    with _as_main(path, arguments), redirect_stderr(told):
        script_trainer.on_train = stop
        # Every worker that runs the script must make the same weights, even if it sets no seed.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            runpy.run_path(place, run_name="__main__")
        except _TrainCalledError as reached:
            return reached.recipe
        except InputError as error:
            problems = Problems()
            problems.take(error, place=f"{place}:")
            raise InputError(problems.found) from None
        except SystemExit as error:
            what = f"ended with {error.code!r} before train()"
            if isinstance(error.code, int) and error.code and told.text:
                what += f": {told.text.strip()}"  # As argparse says what is wrong.
            raise InputError(Problem(place, what)) from None
        except Exception as error:
            raise InputError(_problem_of(error, place)) from error
        finally:
            script_trainer.on_train = None
    what = "does not call train()"
    raise InputError(Problem(place, what, "call sailor.Trainer(...).train()"))


def _problem_of(error: Exception, place: str) -> Problem:
    """Name the script's own line that failed, not ours."""
    where = script_line(error)
    what = f"{type(error).__name__}: {error}"
    cure = "run it with python to debug it"
    if isinstance(error, KeyError | ValueError) and _OF_TORCHRUN.search(str(error)):
        cure = "leave out the process group and its variables: docs/from-torchrun.md"
    ours = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if ours in PACKAGES and _has_module(Path(place).parent, ours):
        cure = f"rename your {ours}: Sailor has a package of that name"
    return Problem(where or place, what, cure)


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set what a script sees of the command that runs it."""
    before, folder = sys.argv, str(path.parent.absolute())
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before
