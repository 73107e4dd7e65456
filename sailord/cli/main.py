"""The command line ``sailorctl``. A command's module is imported when that command runs."""

from __future__ import annotations

import click

from sailord.cli.shared.exit_codes import TEXT
from sailord.cli.shared.lazy_group import LazyGroup, Sections

# By the name of each command: its module, which lies in a folder beside this file, and its line in
# --help. What it prints is made in sailord/text.
SECTIONS: Sections = {
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
        "share": ("planning.share", "Split CLUSTER among several jobs, by their weights."),
        "trace": (
            "planning.trace",
            "Make traces for `replay`, from published logs and sailord's own.",
        ),
        "validate": ("planning.simulate", "Compare predictions with measured runs."),
        "profile": ("profile", "Measure a model's layers and a cluster's links."),
    },
    "Try a cluster on this machine": {
        "up": ("local_cluster", "Start an emulated cluster here and train on it."),
        "tour": ("local_cluster", "Demonstrate recovery on an emulated cluster."),
        "local": ("local_control", "Add and kill nodes of `sailorctl up`, and change its links."),
    },
    "Look at a running cluster": {
        "status": ("cluster.status", "Show the job, its plan and the nodes."),
        "nodes": ("cluster.nodes", "List all nodes, or show one: what would its loss cost?"),
        "jobs": ("cluster.jobs", "List all jobs."),
        "events": ("cluster.status", "Print recent events of the whole cluster."),
        "history": ("cluster.jobs", "Show a job's state transitions, each with its reason."),
        "moves": (
            "cluster.jobs",
            "Show how long each reconfiguration took, measured and predicted.",
        ),
        "timeline": (
            "cluster.jobs",
            "Show one step of the plan, pass by pass, as predicted and as measured.",
        ),
        "why": ("cluster.jobs", "Explain a job's state, its generation and its plan."),
        "logs": ("cluster.nodes", "Show the last output of a node's workers."),
        "goodput": (
            "cluster.goodput",
            "Show what paid GPU time and money were spent on, by cause.",
        ),
        "capacity": (
            "cluster.status",
            "Show rented instances per pool, refused requests, quotas and cost.",
        ),
        "token": ("token", "Make, list and revoke tokens for people, on the head node."),
        "doctor": ("cluster.doctor", "List the cluster's problems with their cures."),
    },
    "Jobs": {
        "submit": ("submit.submit", "Queue the job of FILE."),
        "pause": (
            "cluster.jobs",
            "Pause a job at the end of its step; the next queued job gets the cluster.",
        ),
        "resume": ("cluster.jobs", "Resume a job that is paused or held."),
        "budget": (
            "cluster.jobs",
            "Set the most that a job may cost in all, with what it has cost so far.",
        ),
        "priority": ("cluster.jobs", "Set a job's priority in the queue."),
        "cancel": ("cluster.jobs", "End a job for good; its checkpoints stay in storage."),
        "checkpoint": (
            "checkpoints.checkpoint",
            "List, make, verify, pin and export checkpoints, and roll back.",
        ),
    },
    "Nodes": {
        "drain": ("cluster.nodes", "Move the job off a node without losing a step."),
        "preempt": (
            "cluster.nodes",
            "Announce that a node will be preempted, as a cloud's notice would.",
        ),
        "withdraw": ("cluster.nodes", "Cancel a drain or a preemption notice: the node stays."),
        "cordon": ("cluster.nodes", "Exclude a node from new plans; what runs on it continues."),
        "uncordon": ("cluster.nodes", "Allow a node in new plans again."),
    },
    "Certificates": {
        "ca": ("ca", "Make, renew and revoke certificates of the cluster's authority."),
    },
    "This command": {
        "completion": ("completion", "Print the completion script of SHELL."),
    },
}
"""All commands, in the sections and the order of ``sailorctl --help``."""


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    epilog=TEXT,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="sailor", prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs are available.

    In the commands that plan, JOB is a TOML file or a script, CLUSTER a TOML file and PLAN is JSON
    (docs/formats.md); in those that ask a running cluster, JOB and NODE are names, as `jobs` and
    `nodes` list them.

    Shell completion: eval "$(_SAILORCTL_COMPLETE=bash_source sailorctl)"; zsh and fish likewise.
    """


if __name__ == "__main__":
    main()
