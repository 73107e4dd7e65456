"""The part of the agent's state that is saved before the agent acts on it.

The next agent process reads it, and goes on as the same node.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from agents.core.decide import SERVICE_STOP_PREFIX
from agents.core.model import UNHEARD, Gang, Options, State
from agents.daemon.clock import boot_id, since_boot_s
from agents.protocol.codec import plain, read
from agents.protocol.records import Fence, JobId, NodeId, NodeRecord, NodeState, Uploaded
from worker.atomic_file import replace_file

log = structlog.get_logger("sailor-agent")


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the next agent process must know of this node."""

    boot_id: str
    start: int
    """When this node began, in milliseconds since the epoch."""
    state: NodeState = "joining"
    leaves_at: float | None = None
    notices: tuple[str, ...] = ()
    is_leaving: bool = False
    """The agent was asked to exit, when the file was written."""
    heard: Fence = UNHEARD
    job: JobId | None = None
    left: int = 0
    generation: int = 0
    """Of the workers; 0: there are none."""
    uploaded: tuple[Uploaded, ...] = ()

    def node_id(self, name: str) -> NodeId:
        """Return the node's id: the machine's name, its boot, and when the node began."""
        return NodeId(f"{name}.{self.boot_id[:8]}.{self.start}")


def load_or_begin(path: Path) -> SavedState:
    """Read the saved state; begin a new node after a boot, or if there is no readable file."""
    boot = boot_id()
    saved = None
    try:
        saved = read(SavedState, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass  # It is the first start.
    except (OSError, ValueError) as error:
        log.error("unreadable state: this is a new node now", file=str(path), why=str(error))
    if saved is None or saved.boot_id != boot:
        return SavedState(boot, int(time.time() * 1e3))
    return saved


def save(path: Path, saved: SavedState) -> None:
    """Write the saved state to the disk."""
    replace_file(path, json.dumps(plain(saved)))


def updated(saved: SavedState, state: State) -> SavedState:
    """Return the part of the state to save, which does not change with each step."""
    gang = state.gang
    return replace(
        saved,
        state=state.node.state,
        leaves_at=state.node.leaves_at,
        notices=tuple(sorted(state.notices)),
        is_leaving=state.is_leaving,
        heard=state.heard,
        job=state.job,
        left=state.left,
        generation=0 if gang is None else gang.generation,
        uploaded=state.uploaded,
    )


def stop_notices(saved: SavedState) -> tuple[str, ...]:
    """Return the notices of a stop that did not end the node: this start withdraws them."""
    return tuple(each for each in saved.notices if each.startswith(SERVICE_STOP_PREFIX))


def initial_state(saved: SavedState, node: NodeRecord, options: Options, now: float) -> State:
    """Return the state in which the agent starts; running workers will report the rest."""
    gang = None
    if saved.generation:
        gang = Gang(saved.generation, "fetching", step=0, advanced_at=now)
    return State(
        replace(node, state=saved.state, leaves_at=saved.leaves_at),
        options=options,
        now=now,
        heard=saved.heard,
        job=saved.job,
        gang=gang,
        left=saved.left,
        uploaded=saved.uploaded,
        notices=frozenset(saved.notices),
        # Report numbers grow over all processes of a node, also if the system clock is set back.
        reports=int(since_boot_s() * 1e3),
    )
