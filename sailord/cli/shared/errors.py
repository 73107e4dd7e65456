"""A click group that reports errors as sentences on stderr, with an exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import click

from sailord.cli.shared.exit_codes import FAILED, UNUSABLE_INPUT
from simulator.documents.problems import InputError

_KNOWN_ELSEWHERE = {
    "list": ["ls"],
    "ls": ["list", "jobs"],
    "ps": ["jobs"],
    "run": ["submit"],
    "stop": ["pause", "cancel"],
    "undrain": ["withdraw"],
    "orders": ["history", "events"],
    "down": [],
}
"""What other tools call a command, and what we call it, where a group has it; nothing else that
is merely spelt alike is proposed instead."""


class Group(click.Group):
    """Prints unusable input and failed output as error lines instead of a stack trace."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the commands that may be meant by an unknown one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # noqa: PLC0415 - for mistakes only

            known = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], known, n=3)
            meant = [n for n in _KNOWN_ELSEWHERE.get(args[0], close) if n in known]
            if not meant:
                raise
            guess = f"{error.message} Did you mean {' or '.join(map(repr, meant))}?"
            raise click.UsageError(guess, ctx) from None

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
        except click.NoSuchOption as error:
            given = error.ctx.command.params if error.ctx is not None else []
            if not any(each.name == "arguments" for each in given):
                raise
            what = f"{error.message} A script's own arguments follow --."
            raise click.NoSuchOption(
                error.option_name, what, error.possibilities, error.ctx
            ) from None
        except OSError as error:
            _discard_output()
            where = "the output" if error.filename is None else str(error.filename)
            click.echo(f"error: cannot write {where}: {error.strerror}", err=True)
            ctx.exit(FAILED)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if sys.stdout is None:  # Started with stdout closed.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for all our life
        elif isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # Letters that its encoding lacks.
        return super().main(*args, **kwargs)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail again.

    As ``worker.cli.own_output`` does; a command that asks sailord must not load the worker.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
