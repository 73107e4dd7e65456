"""A click group that reports errors as sentences on stderr, with an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from sailord.cli.exit_codes import FAILED, UNUSABLE_INPUT
from simulator.documents.problems import InputError


class Group(click.Group):
    """Prints unusable input and failed output as error lines instead of a stack trace."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InputError as error:
            for problem in error.problems:
                click.echo(f"error: {problem}", err=True)
            ctx.exit(UNUSABLE_INPUT)
        except BrokenPipeError:
            _discard_output()  # The reader closed the pipe, as `| head` does.
            ctx.exit(0)
        except OSError as error:
            _discard_output()
            where = "the output" if error.filename is None else str(error.filename)
            click.echo(f"error: cannot write {where}: {error.strerror}", err=True)
            ctx.exit(FAILED)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if sys.stdout is None:  # Started with stdout closed.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for all our life
        return super().main(*args, **kwargs)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
