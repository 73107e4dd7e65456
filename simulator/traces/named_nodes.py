"""Which nodes are up, while a trace that names them is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simulator.traces.trace import NodeNames

Flaw = tuple[str, str]
"""What is wrong, and the cure."""


class NamedNodes:
    """The names of the nodes that are up in each pool; ``None`` for pools without names so far."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.up: NodeNames = (None,) * len(sizes)
        self.flawed: set[int] = set()
        """Pools with a reported mistake; further ones there would only follow from it."""

    def note_nodes(
        self, pool: int, names: Sequence[str] | None, gpus: int, change: int | None
    ) -> Flaw | None:
        """Note that a pool has ``gpus`` GPUs from now on; return what is wrong with the names.

        ``names``: of the nodes that are added or, below 0, lost by ``change``; without a change, of
        all that are up.
        """
        flaw = None if pool in self.flawed else self._note(pool, names, gpus, change)
        if flaw is not None:
            self.flawed.add(pool)
        return flaw

    def _note(
        self, pool: int, names: Sequence[str] | None, gpus: int, change: int | None
    ) -> Flaw | None:
        before, size = self.up[pool], self.sizes[pool]
        if names is None:
            if before is None:
                return None
            if gpus and gpus != len(before) * size:
                what = "names no nodes, although earlier entries of the pool do"
                return what, "give nodes in all of a pool or in none"
            names, change = (before if gpus else ()), None
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            return f'names "{twice[0]}" twice', "name each node once"
        now = set(before or ())
        if change is not None and change < 0:
            unknown = [name for name in names if name not in now]
            if unknown:
                what = f'loses "{unknown[0]}", which is not up'
                return what, "name nodes that were added and are not lost yet"
            left = [name for name in before or () if name not in names]
        else:
            again = [name for name in names if name in now] if change is not None else []
            if again:
                return f'adds "{again[0]}", which is up already', "name new nodes"
            left = [*(before or ()), *names] if change is not None else list(names)
        if len(left) * size != gpus:
            what = f"leaves {len(left)} named nodes with {size} GPUs each, but {gpus} GPUs are up"
            cure = (
                "name as many as are added or lost, and at time_s = 0 all that are up;"
                " `trace import` without --names leaves names out"
            )
            return what, cure
        self.up = (*self.up[:pool], tuple(left), *self.up[pool + 1 :])
        return None
