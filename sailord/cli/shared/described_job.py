"""Describes the model of a script, or of a job file that names one of transformers, in a process.

Only a worker process loads torch and runs the user's code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sailord.cli.shared.options import FILE
from simulator.documents.files import parse_document, read_bytes
from simulator.documents.problems import InputError, Problem

if TYPE_CHECKING:
    from simulator.spec.job import Job


WRITES = "writes: "
"""Begins a line of ``python -m worker describe`` about what the script's loggers write."""


@dataclass(frozen=True, slots=True)
class DescribedText:
    """A job's text, with its model described."""

    text: str
    outputs: tuple[str, ...] = ()
    """What its loggers write below the present folder."""


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

    def refuse_options(self, names: str, *others: object, cure: str = "leave them out") -> None:
        """Refuse what only a script takes, if this is a job file."""
        given = (self.arguments, self.workdir, *others)
        if not self.is_script and any(each not in ((), None) for each in given):
            what = f"is a job file; only a script takes {names}"
            raise InputError(Problem(str(self.path), what, cure))

    def described(self) -> DescribedText:
        """Run the script, and return its job."""
        words = ["--workdir", str(self.root()), str(self.path), "--", *self.arguments]
        return _describe(self.path, words)

    def text(self) -> str:
        """Return the job's text, with its model described."""
        if self.is_script:
            return self.described().text
        self.refuse_options("ARGUMENTS and --workdir")
        raw = read_bytes(self.path, name=self._name)
        try:
            document = parse_document(raw, name=self._name, flaws_raise=False)
        except InputError:
            with suppress(UnicodeDecodeError):
                return raw.decode("utf-8-sig")  # Its reader reports its mistakes.
            raise
        if names_hf(document.data.get("model")):
            return _describe(self.path, [str(self.path)]).text
        return raw.decode("utf-8-sig")

    @property
    def _name(self) -> str:
        return self.path.name or str(self.path)

    def load(self) -> Job:
        """Read the job, with its model described."""
        from simulator.inputs.job_file import job_from_document  # noqa: PLC0415 - not for submit

        raw, folder = self.text().encode(), self.path.parent
        document = parse_document(raw, name=self._name, folder=folder, flaws_raise=False)
        return job_from_document(document)

    def root(self) -> Path:
        """Return the folder that the script runs in."""
        root = (self.workdir or self.path.parent).resolve()
        if not root.is_dir():
            raise InputError(Problem(str(root), "is not a folder", "name one with --workdir"))
        if not self.path.resolve().is_relative_to(root):
            what, cure = f"is not in {root}", "name a folder that holds it with --workdir"
            raise InputError(Problem(str(self.path), what, cure))
        return root


def takes_script(command: Callable[..., None]) -> Callable[..., None]:
    """Let JOB be a script: add its ARGUMENTS and its folder, and pass all as one ``JobFile``."""

    @click.argument("arguments", nargs=-1)
    @click.option(
        "--workdir", metavar="DIR", type=FILE, help="A script's folder; default: where it lies."
    )
    @wraps(command)
    def wrapped(job: Path, arguments: tuple[str, ...], workdir: Path | None, **kwargs: Any) -> None:
        command(job=JobFile(job, arguments, workdir), **kwargs)

    return wrapped


def names_hf(model: object) -> bool:
    """Return whether a job's model is one of transformers that is not described yet."""
    return isinstance(model, dict) and "hf" in model and "description" not in model


def _mistakes(told: str) -> str:
    """Return what a process said from its first mistake on; else its last line."""
    lines = told.strip().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
    return "\n".join(lines[max(first, 0) :]).removeprefix("error: ")


def _describe(job: Path, words: Sequence[str]) -> DescribedText:
    import importlib.util  # noqa: PLC0415 - most job files describe their model themselves
    import subprocess  # noqa: PLC0415 - only for the module of a user

    if importlib.util.find_spec("torch") is None:
        what = "needs torch, which is not installed here, to describe its model"
        raise InputError(Problem(str(job), what, "run this where torch is installed"))
    # -P keeps modules of the present folder from taking the place of ours.
    words = [sys.executable, "-P", "-m", "worker", "describe", *words]
    # Workers have this seed, too, so that sets of a script have the same order.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise InputError(Problem("", _mistakes(done.stderr) or f"describing {job} failed"))
    lines = done.stderr.splitlines()
    for line in lines:
        if line.startswith("note: "):
            click.echo(line, err=True)
    outputs = (line.removeprefix(WRITES) for line in lines if line.startswith(WRITES))
    return DescribedText(done.stdout, tuple(outputs))
