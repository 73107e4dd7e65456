"""What an agent writes down before it acts, so that the next one goes on as the same life."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from agents.core.model import Gang, Options, State
from agents.daemon.clock import since_boot_s
from agents.protocol.codec import WireError, plain, read
from agents.protocol.records import Fence, JobId, NodeId, NodeRecord, NodeState, Uploaded

UNREAD = Fence(0, 0)


@dataclass(frozen=True, slots=True)
class Kept:
    """One life: what must outlive the process that lives it."""

    boot_id: str
    start: int
    """When this life began, in milliseconds since the epoch."""
    state: NodeState = "joining"
    leaves_at: float | None = None
    notices: tuple[str, ...] = ()
    is_leaving: bool = False
    heard: Fence = UNREAD
    job: JobId | None = None
    left: int = 0
    generation: int = 0
    """Of the workers; 0: there are none."""
    uploaded: tuple[Uploaded, ...] = ()

    def node_id(self, name: str) -> NodeId:
        """Name the life: the machine's name, its boot, and the life's own start."""
        return NodeId(f"{name}.{self.boot_id[:8]}.{self.start}")


def read_boot_id() -> str:
    """Return this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def recall(path: Path) -> Kept:
    """Go on with the life in the file, or begin one after a boot, a clean end, or damage."""
    boot_id = read_boot_id()
    try:
        kept = read(Kept, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, WireError):
        kept = None
    if kept is None or kept.boot_id != boot_id:
        return Kept(boot_id, int(time.time() * 1e3))
    return kept


def keep(path: Path, kept: Kept) -> None:
    """Replace the file as a whole, on the disk before anybody acts on it."""
    early = path.with_name(f"{path.name}.new")
    with early.open("w", encoding="utf-8") as file:
        json.dump(plain(kept), file)
        file.flush()
        os.fsync(file.fileno())
    early.rename(path)


def to_keep(kept: Kept, state: State) -> Kept:
    """Return what of the state must not be forgotten; a step alone is no reason to write."""
    gang = state.gang
    return replace(
        kept,
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


def first_state(kept: Kept, node: NodeRecord, options: Options, now: float) -> State:
    """Return what the agent knows as it starts; its workers, if any, will say the rest."""
    gang = None
    if kept.generation:
        gang = Gang(kept.generation, "fetching", step=0, advanced_at=now)
    return State(
        replace(node, state=kept.state, leaves_at=kept.leaves_at),
        options=options,
        now=now,
        heard=kept.heard,
        job=kept.job,
        gang=gang,
        left=kept.left,
        uploaded=kept.uploaded,
        is_leaving=kept.is_leaving,
        notices=frozenset(kept.notices),
        # Numbered upwards over all processes of a life, even if somebody sets the clock back.
        reports=int(since_boot_s() * 1e3),
    )
