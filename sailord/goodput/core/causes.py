"""The causes on which paid GPU time is booked; each GPU has exactly one at any moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Cause = Literal[
    "training",
    "idle_in_plan",
    "checkpoint_stall",
    "slow_node",
    "moving_detect",
    "moving_plan",
    "moving_quiesce",
    "moving_fetch",
    "moving_rebuild",
    "moving_verify",
    "moving_first_step",
    "recovering",
    "waiting_for_capacity",
    "held",
    "paused",
    "no_job",
    "unused",
    "booting",
    "leaving",
    "lost",
    "unobserved",
    "step_under_way",
]
TEXTS: Mapping[Cause, str] = {
    "training": "computing steps that count",
    "idle_in_plan": "pipeline bubbles, communication, GPUs that the plan leaves out of its nodes",
    "checkpoint_stall": "steps paused by a snapshot",
    "slow_node": "waiting for a straggler, and stragglers left out",
    "moving_detect": "from the last step until a loss or failure was known and plans could begin",
    "moving_plan": "waiting for the planner",
    "moving_quiesce": "parking the old generation, storing the next one",
    "moving_fetch": "fetching state",
    "moving_rebuild": "rebuilding the model",
    "moving_verify": "verifying the restored state",
    "moving_first_step": "the first step of a generation, beyond a usual one",
    "recovering": "training lost steps again; waiting before another attempt after a failure",
    "waiting_for_capacity": "no plan: too few nodes, or a limit allows none",
    "held": "the job is held, or has no plan within its limits in dollars",
    "paused": "the job is paused",
    "no_job": "no job has the cluster",
    "unused": "up, and the plan does not use it",
    "booting": "rented or registered, and not ready for work yet",
    "leaving": "draining, and no longer in the plan",
    "lost": "paid for, but the node is lost",
    "unobserved": "no sailord was the leader",
    "step_under_way": "the step under way; it is booked when it ends",
}
"""What each cause means."""
_MOVING = "moving_"


def label_of(cause: Cause) -> str:
    """Return what people read instead of the stored name."""
    if cause == "idle_in_plan":
        return "waiting within steps"
    if cause == "held":
        return "waiting for an order"
    if cause == "leaving":
        return "draining"
    if cause == "recovering":
        return "repeated steps"
    if cause.startswith(_MOVING):
        return f"reconfiguring: {cause.removeprefix(_MOVING).replace('_', ' ')}"
    return cause.replace("_", " ")
