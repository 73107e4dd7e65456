"""Random numbers for searches that need them: a seed gives the same ones on every machine."""

from __future__ import annotations


class SeededRandom:
    """Random numbers that a seed fixes on every machine (the splitmix64 generator)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, end: int) -> int:
        """A whole number from 0 to ``end - 1``."""
        mask = (1 << 64) - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        mixed = self._state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        return (mixed ^ mixed >> 31) * end >> 64

    def shuffled(self, count: int) -> list[int]:
        """All numbers below ``count`` in random order."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
