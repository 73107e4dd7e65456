"""Runs a user's script up to its ``train()``, to take what it gives."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from simulator.documents.problems import InputError, Problem, Problems
from worker.script import script_trainer
from worker.script.recipe import Recipe
from worker.script.script_error import script_line

_OF_TORCHRUN = re.compile(r"\b(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")
"""Variables of the environment that torchrun sets."""


class _TrainCalledError(BaseException):
    """Ends the script at ``train()``, through any ``except Exception`` of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe


def load_script(path: Path, arguments: Sequence[str] = ()) -> Recipe:
    """Run a script as ``python PATH ARGUMENTS`` would, and return what it would train."""

    def stop(recipe: Recipe) -> NoReturn:
        raise _TrainCalledError(recipe)

    place = str(path)
    if not path.is_file():
        raise InputError(Problem(place, "does not exist", "name a Python script"))
    with _as_main(path, arguments):
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
            raise InputError(Problem(place, f"ended with {error.code!r} before train()")) from None
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
    return Problem(where or place, what, cure)


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
