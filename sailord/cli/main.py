"""The command line ``sailorctl``. A command's module is imported when that command runs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

import click

from sailord.cli.errors import Group
from sailord.cli.exit_codes import TEXT

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Plan and simulate, without a cluster": {
        "plan": ("planning.plan", "Find the best plan for JOB on CLUSTER."),
        "simulate": (
            "planning.simulate",
            "Estimate the time, memory and cost of PLAN for JOB on CLUSTER.",
        ),
        "compare": (
            "planning.compare",
            "Run all planners on JOB and CLUSTER, judged by one simulator.",
        ),
        "frontier": ("planning.frontier", "Find the trade-off of throughput and cost."),
        "replan": ("planning.replan", "Find the plan that should follow PLAN on the new CLUSTER."),
        "replay": (
            "planning.replay",
            "Replay an availability TRACE under several replanning policies.",
        ),
        "validate": ("planning.simulate", "Compare predictions with measured runs."),
        "profile": ("profile", "Measure a model's layers and a cluster's links."),
    },
    "Try a cluster on this machine": {
        "up": ("local_cluster", "Start an emulated cluster here and train on it."),
        "tour": ("local_cluster", "Demonstrate recovery on an emulated cluster."),
        "local": ("local_cluster", "Add and kill nodes of `sailorctl up`, and change its links."),
    },
    "Look at a running cluster": {
        "status": ("cluster", "Show the job, its plan and the nodes."),
        "nodes": ("nodes", "List all nodes."),
        "jobs": ("jobs", "List all jobs."),
        "events": ("cluster", "Print recent events of the whole cluster."),
        "history": ("jobs", "Show a job's state transitions, each with its reason."),
        "moves": ("jobs", "Show how long each reconfiguration took, measured and predicted."),
        "why": ("jobs", "Explain a job's state, its generation and its plan."),
        "logs": ("nodes", "Show the last output of a node's workers."),
        "capacity": (
            "cluster",
            "Show rented instances per pool, refused requests, quotas and cost.",
        ),
        "token": ("token", "Make, list and revoke tokens for people, on the head node."),
        "doctor": ("doctor", "List the cluster's problems with their cures."),
    },
    "Jobs": {
        "submit": ("jobs", "Queue the job of FILE."),
        "pause": (
            "jobs",
            "Pause a job at the end of its step; the next queued job gets the cluster.",
        ),
        "resume": ("jobs", "Resume a job that is paused or held."),
        "cancel": ("jobs", "End a job for good; its checkpoints stay in storage."),
        "checkpoint": (
            "checkpoint",
            "List, make, verify, pin and export checkpoints, and roll back.",
        ),
    },
    "Nodes": {
        "drain": ("nodes", "Move the job off a node without losing a step."),
        "preempt": ("nodes", "Announce that a node will be preempted, as a cloud's notice would."),
        "withdraw": ("nodes", "Cancel a drain or a preemption notice: the node stays."),
        "cordon": ("nodes", "Exclude a node from new plans; what runs on it continues."),
        "uncordon": ("nodes", "Allow a node in new plans again."),
    },
    "Certificates": {
        "ca": ("ca", "Make, renew and revoke certificates of the cluster's authority."),
    },
    "This command": {
        "completion": ("completion", "Print the completion script of SHELL."),
    },
}
"""All commands, in the sections and the order of ``sailorctl --help``: each one's module, which
defines it under its own name, and the summary that the list prints."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class LazyGroup(Group):
    """Imports a command when it is used; ``--help`` prints the summaries of the table above."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"sailord.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, entries in SECTIONS.items():
            with formatter.section(heading):
                rows = [(name, summary) for name, (_, summary) in entries.items()]
                formatter.write_dl(rows, col_max=12)


@click.group(cls=LazyGroup, epilog=TEXT, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs are available.

    In the commands that plan, JOB is a TOML file or a script, CLUSTER a TOML file and PLAN is JSON
    (docs/formats.md); in those that ask a running cluster, JOB and NODE are names, as `jobs` and
    `nodes` list them.

    Shell completion: eval "$(_SAILORCTL_COMPLETE=bash_source sailorctl)"; zsh and fish likewise.
    """


if __name__ == "__main__":
    main()
