"""When a packet arrives that crosses NICs and a link of limited rate and given delay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

QUEUE_S = 0.05
"""A packet that would wait longer than this and than the link's round trip, is dropped."""


@dataclass(slots=True)
class Queue:
    """A NIC or a link, one way: it carries packets one after the other."""

    bytes_per_s: float | None = None
    """``None``: unlimited."""
    free_at: float = 0.0


@dataclass(slots=True)
class Path:
    """From the nodes of one zone to those of another."""

    queue: Queue
    delay_s: float = 0.0
    is_down: bool = False


@dataclass(eq=False, slots=True)
class Shaper:
    """The state of all NICs and links."""

    paths: dict[tuple[str, str], Path] = field(default_factory=dict)
    """By sending and receiving zone; others have neither delay nor limit."""
    sending: dict[str, Queue] = field(default_factory=dict)
    """NICs, by node."""
    receiving: dict[str, Queue] = field(default_factory=dict)
    zones: dict[str, str] = field(default_factory=dict)
    """The zone of each node."""
    bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of packets that were not dropped, by sending and receiving node."""

    def add_node(self, name: str, zone: str, nic_bytes_per_s: float | None) -> None:
        """Add a node."""
        self.zones[name] = zone
        self.sending[name] = Queue(nic_bytes_per_s)
        self.receiving[name] = Queue(nic_bytes_per_s)

    def arrival(self, sender: str, receiver: str, size: int, now: float) -> float | None:
        """Return when a packet arrives that is sent now; ``None``: it is dropped."""
        ends = self.zones[sender], self.zones[receiver]
        path = self.paths.get(ends)
        if path is None:
            path = self.paths[ends] = Path(Queue())
        if path.is_down:
            return None
        queues = (self.sending[sender], path.queue, self.receiving[receiver])
        through = _carry(queues, size, now, max(QUEUE_S, 2 * path.delay_s))
        if through is None:
            return None
        self.bytes_sent[sender, receiver] += size
        return through + path.delay_s


def _carry(queues: Iterable[Queue], size: int, now: float, wait_s: float) -> float | None:
    """Return when a packet is through all queues; each passes its bytes on as they come."""
    limited = [queue for queue in queues if queue.bytes_per_s is not None]
    if any(queue.free_at - now > wait_s for queue in limited):
        return None
    begin = end = now
    for queue in limited:
        assert queue.bytes_per_s is not None
        begin = max(begin, queue.free_at)
        end = max(end, begin + size / queue.bytes_per_s)
        queue.free_at = end
    return end
