"""What workers say of themselves, and what a node's workers say taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.core.model import Measured
from agents.protocol.records import NodeId, Point, Taking

ORDER: tuple[Taking, ...] = ("fetching", "rebuilding", "verifying", "running", "stopped")


@dataclass(frozen=True, slots=True)
class Word:
    """What one worker says of itself, in full."""

    generation: int
    rank: int
    taking: Taking
    """``idle``: it has left the groups of this generation, and waits for another."""
    step: int = 0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    room_needed: int = 0
    """It failed since the node's memory has no room for snapshots: so many bytes must be free."""
    room_short: int = 0
    """It waits with a snapshot until so many bytes are free."""
    loss: float | None = None
    tokens_per_s: float | None = None
    stall_s: float | None = None
    late_s: float | None = None
    settle_s: float | None = None
    busy_s: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    meeting: str = ""
    """Where the ranks of the generation meet, as ``host:port``; from rank 0."""
    sealed_at: Point | None = None
    """The last snapshot that it sealed: the agent looks at the file."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a node's workers stand, taken together."""

    taking: Taking
    step: int
    broken_peers: tuple[NodeId, ...]
    measured: Measured


def sum_up(words: Sequence[Word]) -> Summary:
    """Take words of one generation together: the node is as far as the last of its workers."""
    takings = {word.taking for word in words}
    least: Taking = next((taking for taking in ORDER if taking in takings), "idle")
    peers = sorted({peer for word in words for peer in word.broken_peers})
    step = min(word.step for word in words)
    return Summary("broken" if "broken" in takings else least, step, tuple(peers), _measured(words))


def _measured(words: Sequence[Word]) -> Measured:
    """The slowest is what counts."""
    last = max(words, key=lambda word: (word.loss is not None, word.step))
    rates = [word.tokens_per_s for word in words if word.tokens_per_s is not None]
    # What one waited for and what another did may not be mixed.
    stalls = [(word.stall_s, word.late_s) for word in words if word.stall_s is not None]
    stall_s, late_s = max(stalls, key=lambda pair: pair[0], default=(None, None))
    settled = [word.settle_s for word in words if word.settle_s is not None]
    phases: dict[str, float] = {}
    for name, seconds in (phase for word in words for phase in word.phases):
        phases[name] = max(seconds, phases.get(name, 0.0))
    busy = sorted((word.rank, word.busy_s) for word in words if word.busy_s is not None)
    return Measured(
        last.loss,
        min(rates, default=None),
        stall_s,
        late_s,
        max(settled, default=None),
        tuple(phases.items()),
        tuple(busy),
    )
