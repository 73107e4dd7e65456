"""Describes the model of a script, or of a job file that names one of transformers, in a process.

Only a worker process loads torch and runs the user's code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.documents.files import load_document, parse_document, read_bytes
from simulator.documents.problems import InputError, Problem

if TYPE_CHECKING:
    from simulator.spec.job import Job


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job as a command names it: a job file, or a script with its arguments and its folder."""

    path: Path
    arguments: tuple[str, ...] = ()
    workdir: Path | None = None

    @property
    def is_script(self) -> bool:
        """Whether it is a script."""
        return self.path.suffix == ".py"

    def load(self) -> Job:
        """Read the job, with its model described."""
        from simulator.inputs.job_file import (  # noqa: PLC0415 - submit reads no job
            job_from_document,
            load_job,
        )

        if self.is_script:
            text = describe_script(self.path, self.root(), self.arguments)
        elif self.arguments or self.workdir is not None:
            what = "is a job file; only a script takes ARGUMENTS and --workdir"
            raise InputError(Problem(str(self.path), what, "leave them out"))
        elif (given := _text_to_describe(self.path)) is not None:
            text = given
        else:
            return load_job(self.path)
        return job_from_document(parse_document(text.encode(), name=str(self.path)))

    def root(self) -> Path:
        """Return the folder that the script runs in."""
        root = (self.workdir or self.path.parent).resolve()
        if not root.is_dir():
            raise InputError(Problem(str(root), "is not a folder", "name one with --workdir"))
        if not self.path.resolve().is_relative_to(root):
            what, cure = f"is not in {root}", "name a folder that holds it with --workdir"
            raise InputError(Problem(str(self.path), what, cure))
        return root


def _text_to_describe(path: Path) -> str | None:
    """Return a job file with the description of the model of transformers that it names."""
    if not names_hf(load_document(path, flaws_raise=False).data.get("model")):
        return None
    return _described(path, [str(path)])


def names_hf(model: object) -> bool:
    """Return whether a job's model is one of transformers that is not described yet."""
    return isinstance(model, dict) and "hf" in model and "description" not in model


def described_text(job: Path) -> str:
    """Return a job file's text; with the model's description, if it names one of transformers."""
    try:
        text = read_bytes(job, name=str(job)).decode()
    except UnicodeDecodeError:
        raise InputError(Problem(str(job), "is not UTF-8")) from None
    try:
        model = parse_document(text.encode(), name=str(job), flaws_raise=False).data.get("model")
    except InputError:
        return text  # sailord reports its mistakes.
    return _described(job, [str(job)]) if names_hf(model) else text


def describe_script(script: Path, root: Path, arguments: Sequence[str]) -> str:
    """Run a script up to its ``train()``, and return its job."""
    return _described(script, ["--workdir", str(root), str(script), "--", *arguments])


def _mistakes(told: str) -> str:
    """Return what a process said from its first mistake on; else its last line."""
    lines = told.strip().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
    return "\n".join(lines[max(first, 0) :]).removeprefix("error: ")


def _described(job: Path, words: Sequence[str]) -> str:
    import importlib.util  # noqa: PLC0415 - most job files describe their model themselves
    import subprocess  # noqa: PLC0415 - only for the module of a user

    if importlib.util.find_spec("torch") is None:
        what = "needs torch, which is not installed here, to describe its model"
        raise InputError(Problem(str(job), what, "run this where torch is installed"))
    words = [sys.executable, "-m", "worker", "describe", *words]
    # As in the workers: sets of a script are in one order.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise InputError(Problem("", _mistakes(done.stderr) or f"describing {job} failed"))
    for line in done.stderr.splitlines():
        if line.startswith("note: "):
            click.echo(line, err=True)
    return done.stdout
