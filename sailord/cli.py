"""The command line ``sailorctl``: what a person types, and how mistakes are answered.

Exit codes: 0 done; 1 it was tried and something in it failed; 2 the input cannot be used;
3 the plan was estimated but does not fit its devices.
"""

from __future__ import annotations

from importlib.metadata import version

import click

from sailord import offline
from sailord.checkpoint_command import checkpoint
from sailord.compare_command import compare
from sailord.console import Group
from sailord.frontier_command import frontier_command
from sailord.local.up import local, tour, up
from sailord.online import COMMANDS
from sailord.plan_command import plan
from sailord.replan_command import replan_command
from sailord.replay_command import replay


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
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
main.add_command(up)
main.add_command(tour)
main.add_command(local)
main.add_command(checkpoint)
for command in COMMANDS:
    main.add_command(command)
