"""The command line ``sailorctl``. A command's module is imported when that command runs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import click

from sailord.cli.errors import Group
from sailord.cli.exit_codes import TEXT


class Entry(NamedTuple):
    """Where a command is defined, and the summary that the list of commands prints."""

    module: str
    attribute: str
    summary: str


SECTIONS: dict[str, dict[str, Entry]] = {
    "Plan and simulate, without a cluster": {
        "plan": Entry("plan", "plan", "Find the best plan for JOB on CLUSTER."),
        "simulate": Entry(
            "simulate", "simulate", "Estimate the time, memory and cost of PLAN for JOB on CLUSTER."
        ),
        "compare": Entry(
            "compare", "compare", "Run all planners on JOB and CLUSTER, judged by one simulator."
        ),
        "frontier": Entry(
            "frontier", "frontier_command", "Find the trade-off of throughput and cost."
        ),
        "replan": Entry(
            "replan", "replan_command", "Find the plan that should follow PLAN on the new CLUSTER."
        ),
        "replay": Entry(
            "replay", "replay", "Replay an availability TRACE under several replanning policies."
        ),
        "validate": Entry("simulate", "validate", "Compare predictions with measured runs."),
    },
    "Try a cluster on this machine": {
        "up": Entry("local_cluster", "up", "Start an emulated cluster here and train on it."),
        "tour": Entry("local_cluster", "tour", "Demonstrate recovery on an emulated cluster."),
        "local": Entry("local_cluster", "local", "Add and kill nodes of `sailorctl up`."),
    },
    "Look at a running cluster": {
        "status": Entry("cluster", "status", "Show the job, its plan and the nodes."),
        "nodes": Entry("nodes", "nodes", "List all nodes."),
        "jobs": Entry("jobs", "jobs", "List all jobs."),
        "events": Entry("cluster", "events", "Print recent events of the whole cluster."),
        "history": Entry(
            "jobs", "history", "Show a job's state transitions, each with its reason."
        ),
        "moves": Entry(
            "jobs", "moves", "Show how long each reconfiguration took, measured and predicted."
        ),
        "why": Entry("jobs", "why", "Explain a job's state, its generation and its plan."),
        "logs": Entry("nodes", "logs", "Show the last output of a node's workers."),
        "capacity": Entry(
            *("cluster", "capacity"),
            "Show rented instances per pool, refused requests, quotas and cost.",
        ),
        "doctor": Entry("doctor", "doctor", "List the cluster's problems with their cures."),
    },
    "Jobs": {
        "submit": Entry("jobs", "submit", "Queue the job of FILE."),
        "pause": Entry(
            *("jobs", "pause"),
            "Pause a job at the end of its step; the next queued job gets the cluster.",
        ),
        "resume": Entry("jobs", "resume", "Resume a job that is paused or held."),
        "cancel": Entry("jobs", "cancel", "End a job for good; its checkpoints stay in storage."),
        "checkpoint": Entry(
            *("checkpoint", "checkpoint"),
            "List, make, verify, pin and export checkpoints, and roll back.",
        ),
    },
    "Nodes": {
        "drain": Entry("nodes", "drain", "Move the job off a node without losing a step."),
        "preempt": Entry(
            *("nodes", "preempt"),
            "Announce that a node will be preempted, as a cloud's notice would.",
        ),
        "withdraw": Entry(
            *("nodes", "withdraw"), "Cancel a drain or a preemption notice: the node stays."
        ),
        "cordon": Entry(
            "nodes", "cordon", "Exclude a node from new plans; what runs on it continues."
        ),
        "uncordon": Entry("nodes", "uncordon", "Allow a node in new plans again."),
    },
    "This command": {
        "completion": Entry("completion", "completion", "Print the completion script of SHELL."),
    },
}
"""All commands, in the sections and the order of ``sailorctl --help``."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class LazyGroup(Group):
    """Imports a command when it is used; ``--help`` prints the summaries of the table above."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        entry = COMMANDS[cmd_name]
        command = getattr(import_module(f"sailord.cli.{entry.module}"), entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, entries in SECTIONS.items():
            with formatter.section(heading):
                rows = [(name, entry.summary) for name, entry in entries.items()]
                formatter.write_dl(rows, col_max=12)


@click.group(cls=LazyGroup, epilog=TEXT, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs are available.

    In the commands that plan, JOB and CLUSTER are TOML files and PLAN is JSON (docs/formats.md); in
    those that ask a running cluster, JOB and NODE are names, as `jobs` and `nodes` list them.

    Shell completion: eval "$(_SAILORCTL_COMPLETE=bash_source sailorctl)"; zsh and fish likewise.
    """


if __name__ == "__main__":
    main()
