"""The command line ``sailorctl``: what a person types, and how mistakes are answered.

Exit codes: 0 done; 1 it was tried and something in it failed; 2 the input cannot be used;
3 the plan was estimated but does not fit its devices.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import click

from sailord import offline
from sailord.compare_command import compare
from sailord.frontier_command import frontier_command
from sailord.plan_command import plan
from sailord.replan_command import replan_command
from sailord.replay_command import replay
from simulator.errors import InputError

SOME_FAILED = 1
UNUSABLE_INPUT = 2


class _Group(click.Group):
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs can be had.

    JOB and CLUSTER are TOML files, PLAN is JSON (docs/formats.md). Every command takes --json.

    Shell completion: eval "$(_SAILORCTL_COMPLETE=bash_source sailorctl)"; zsh and fish likewise.
    """


main.add_command(offline.simulate)
main.add_command(offline.validate)
main.add_command(plan)
main.add_command(replan_command)
main.add_command(compare)
main.add_command(frontier_command)
main.add_command(replay)
