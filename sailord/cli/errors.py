"""How every command of ours answers mistakes: with sentences and an exit code."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import click

from simulator.documents.problems import InputError

SOME_FAILED = 1
UNUSABLE_INPUT = 2


class Finite(click.FloatRange):
    """A range without NaN and infinity, which Python reads as numbers like any other."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Group(click.Group):
    """Answers a user's mistake with sentences, never with a stack trace."""

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
            # The reader of our output has gone (as `| head` does); nothing is left to say.
            _discard_output()
            ctx.exit(0)
        except OSError as error:
            _discard_output()
            click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
            ctx.exit(SOME_FAILED)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if sys.stdout is None:
            # Someone has closed our output; the exit code is all that is left to say.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for all our life
        return super().main(*args, **kwargs)


def _discard_output() -> None:
    """What is still buffered must not fail a second time when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
