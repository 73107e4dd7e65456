"""What it costs to bring a byte from one place to another, in seconds and in dollars."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.inputs.supply_check import PlaceKey
from simulator.network.network import Network
from simulator.spec.plan import Place

PIECE_BYTES = 64 * 2**20
"""State travels in pieces of about this size."""


def place_of(key: PlaceKey) -> Place:
    """The place without a node."""
    return Place(*key)


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Prices of ways between machines, each looked up once."""

    network: Network
    usd_per_s: float
    """What a second is worth in which nobody trains: the rent of the machines that wait."""
    _known: dict[tuple[PlaceKey, PlaceKey], float] = field(default_factory=dict)

    def usd_per_byte(self, source: PlaceKey, target: PlaceKey) -> float:
        """Rent while the byte is on its way, and egress."""
        key = (source, target)
        found = self._known.get(key)
        if found is None:
            seconds = self.network.between_nodes(
                place_of(source), place_of(target), flows=1, bytes_each=PIECE_BYTES
            )
            egress = self.network.egress_usd_per_byte(source[2], target[2])
            found = self._known[key] = self.usd_per_s * seconds / PIECE_BYTES + egress
        return found
