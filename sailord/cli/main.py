"""The command line ``sailorctl``: what a person types, and how mistakes are answered.

Exit codes: 0 done; 1 it was tried and something in it failed; 2 the input cannot be used;
3 the plan was estimated but does not fit its devices.
"""

from __future__ import annotations

from importlib.metadata import version

import click

from sailord.cli import simulate
from sailord.cli.checkpoint import checkpoint
from sailord.cli.cluster import COMMANDS
from sailord.cli.compare import compare
from sailord.cli.errors import Group
from sailord.cli.frontier import frontier_command
from sailord.cli.local_cluster import local, tour, up
from sailord.cli.plan import plan
from sailord.cli.replan import replan_command
from sailord.cli.replay import replay

SECTIONS = {
    "Plan and simulate, without a cluster": (
        *("plan", "simulate", "compare", "frontier", "replan", "replay", "validate"),
    ),
    "Try a cluster on this machine": ("up", "tour", "local"),
    "Look at a running cluster": (
        *("status", "nodes", "jobs", "events", "history", "moves", "why", "logs", "capacity"),
        "doctor",
    ),
    "Jobs": ("submit", "pause", "resume", "cancel", "checkpoint"),
    "Nodes": ("drain", "preempt", "withdraw", "cordon", "uncordon"),
    "This command": ("completion",),
}
"""What help lists together."""


class Sectioned(Group):
    """Lists commands by what they are for, each with its whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in SECTIONS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            rows = [(name, each.get_short_help_str(200)) for name, each in commands if each]
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=12)


@click.group(cls=Sectioned, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs can be had.

    Where plans are made, JOB and CLUSTER are TOML files and PLAN is JSON (docs/formats.md); where a
    running cluster is asked, JOB and NODE are names, as `jobs` and `nodes` list them. With --json a
    command prints what programs read.

    Shell completion: eval "$(_SAILORCTL_COMPLETE=bash_source sailorctl)"; zsh and fish likewise.
    """


main.add_command(simulate.simulate)
main.add_command(simulate.validate)
main.add_command(plan)
main.add_command(replan_command)
main.add_command(compare)
main.add_command(frontier_command)
main.add_command(replay)
main.add_command(up)
main.add_command(tour)
main.add_command(local)
main.add_command(checkpoint)
for command in COMMANDS:
    main.add_command(command)
