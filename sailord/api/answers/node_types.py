"""Types of the API's answers about nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SeenState = Literal[
    "joining", "ready", "draining", "cordoned", "slow", "suspect", "lost", "unreadable"
]


@dataclass(frozen=True, slots=True)
class LossView:
    """What the active job would lose if a node died now, by the last reports."""

    steps: int | None
    """To be repeated, at most; null: not known, since some nodes have not reported what they
    keep."""
    step: int | None
    """The step from which it would go on."""
    seconds: float | None
    """What training these steps again takes, without the move itself; null: not known."""
    source: Literal["start", "memory", "durable"] | None
    """Where that step is; null: not known, or the job would not be interrupted."""
    kept_on: tuple[str, ...]
    """With source ``memory``: nodes that keep what the node has of that step, at most eight."""
    keepers: int
    """How many such nodes there are."""
    text: str
    next_nodes: int | None = None
    """Nodes of the plan that would follow; null: not computed yet, or there is none."""
    next_step_s: float | None = None
    """The duration of its steps, scaled by how far the present plan's prediction is off."""
    next_gpus: int | None = None
    """The GPUs that it uses."""
    why_no_plan: str | None = None
    """Why no plan would follow; null: one would, or that was not computed yet."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, from its registration to its loss."""

    id: str
    name: str
    state: SeenState
    zone: str
    machine: str
    gpu: str
    gpus: int
    spot: bool
    address: str
    cordoned: bool
    leaves_at: float | None
    """Announced end, in seconds since 1970; null: none, or unknown."""
    taking: str | None
    generation: int | None
    step: int | None
    failure: str
    why_lost: str
    trouble: str
    """Why its snapshots are not replicated or uploaded."""
    safe_to_stop: bool
    """It is draining, and no job needs its data any more."""
    unsound: str
    """Why no plan uses it: a broken device, too little memory for snapshots, a record that sailord
    cannot read, or another protocol."""
    slow: str
    """How much slower than peers or its past a straggler is, and why it is used nevertheless."""
    slow_since: float | None = None
    """Since when it has been slow; null: it is not, or is left out."""
    idle: str = ""
    """Why no plan uses it though one could, and when it is looked at next."""
    cordoned_why: str = ""
    """The reason of the order that cordoned it, and who gave it; empty: not known."""
    cordoned_at: float | None = None
    """When that was ordered; null: too long ago to be known."""
    drained_why: str = ""
    """The same of the order that drains or preempts it."""
    drained_at: float | None = None
    version: str = ""
    """Of Sailor on the node; empty: of an older one that does not say."""
    loss: LossView | None = None
    """Null: the node is lost, no job is active, or it has not begun."""


@dataclass(frozen=True, slots=True)
class NodeList:
    """Nodes, by name."""

    nodes: tuple[NodeView, ...]
    lost: tuple[str, ...] = ()
    """Names of lost nodes that are no longer among these, as long as doctor lists them."""
