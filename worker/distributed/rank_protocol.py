"""The protocol number of the messages between the ranks of a generation while they train.

It grows whenever collectives between ranks change, or their order, or what is compared, or which
numbers dropout draws, since ranks that share a layer need the same ones. Ranks with different
numbers would wait for each other in vain, or add up what does not belong together, so all ranks
must speak the same one. Agents and workers have another (``worker.spec_protocol``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from worker.version import own_version

SPEAKS = 7
"""The number of this version; of versions before there was one: 0."""
_KEY = "code"


@dataclass(frozen=True, slots=True)
class RankCode:
    """The code that a rank runs."""

    speaks: int = 0
    version: str = ""

    def __str__(self) -> str:
        name = f"Sailor {self.version}" if self.version else "an earlier version"
        return f"{name} (ranks' protocol {self.speaks})"


VERSION = own_version()
"""Of the code that was loaded; an upgrade replaces what is installed beside it."""


class OtherCodeError(Exception):
    """Two ranks run code that does not train together."""


def announce_code(store: Store) -> None:
    """Store, as rank 0 and before other ranks come, which code the ranks of this generation run."""
    store.set(_KEY, json.dumps(asdict(RankCode(SPEAKS, VERSION))))


def check_code(store: Store, rank: int) -> None:
    """Raise ``OtherCodeError`` if rank 0 runs code that does not train with that of this rank."""
    first, own = RankCode(), RankCode(SPEAKS, VERSION)
    if store.check([_KEY]):
        said = json.loads(store.multi_get([_KEY])[0])  # One round trip; ``get`` waits first.
        first = RankCode(int(said["speaks"]), str(said["version"]))
    if first.speaks == own.speaks:
        return
    older = "this node" if own.speaks < first.speaks else "the node of rank 0"
    raise OtherCodeError(
        f"rank {rank} runs {own}, and rank 0 {first}, which do not train together: drain {older}"
        " (sailorctl drain NODE) and restart its agent, so that its workers are of one version"
    )
