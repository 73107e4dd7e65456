"""An instance that the provider bills, and what it has cost.

Its fields are keys in the store, as those of ``CapacityRecord``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sailord.providers.interface import Instance

RETURN_S = 15.0
"""An agent that was away for no longer is expected back, as after an outage of the store."""


@dataclass(frozen=True, slots=True)
class RentedInstance:
    """An instance, with its cost, its agent and its deletion."""

    instance: Instance
    usd_per_hour: float | None
    """``None``: unknown."""
    priced_from: float
    """When this price began; what it cost earlier is in ``paid_usd`` and ``paid_gpu_us``."""
    known_since: float
    paid_usd: float = 0.0
    paid_gpu_us: int = 0
    """GPU microseconds."""
    was_seen: bool = False
    """Whether it was observed; a later observation without it then means that it was deleted."""
    running_since: float | None = None
    joined_at: float | None = None
    """When its agent registered."""
    absent_since: float | None = None
    """Since when its agent is no longer registered."""
    is_leaving: bool = False
    """Its node is draining, by whatever order or notice, or will end."""
    is_out: bool = False
    """Its node is quarantined: another one is requested, and it stays to be looked at."""
    idle_since: float | None = None
    """Since when it is leaving and the job needs nothing on it."""
    is_drained: bool = False
    """sailord ordered the job to move off it."""
    is_retiring: bool = False
    """The provider will soon delete it by itself: another one is requested."""
    gpus: int | None = None
    """As reported by its agent."""
    ended_at: float | None = None
    """Since when it costs nothing."""
    is_missed: bool = False
    """The last observation did not show it and its end is not known yet; assumed to be that
    observation until the next one."""
    deletion_at: float | None = None
    """When its deletion was last ordered."""
    deletions: int = 0
    """How often its deletion was ordered."""
    why: str = ""
    """Why it is marked for deletion; empty: it is not."""

    def as_of(self, now: float) -> RentedInstance:
        """Return it for a leader that takes over: the last one's clock may have been ahead.

        A moment to come would put off all that is due some time after it.
        """

        def past(at: float | None) -> float | None:
            return None if at is None else min(at, now)

        return replace(
            self,
            known_since=min(self.known_since, now),
            running_since=past(self.running_since),
            absent_since=past(self.absent_since),
            idle_since=past(self.idle_since),
            deletion_at=past(self.deletion_at),
        )

    def usd(self, now: float) -> float:
        """Return what it has cost up to ``now``."""
        hours = max(self._end(now) - self.priced_from, 0.0) / 3600
        return self.paid_usd + (self.usd_per_hour or 0.0) * hours

    def gpu_us(self, now: float) -> int:
        """Return the GPU microseconds that were paid for up to ``now``; whole, so that they sum.

        It may turn out later that the instance had ended before its price changed.
        """
        us = round(self._end(now) * 1e6) - round(self.priced_from * 1e6)
        return max(self.paid_gpu_us + self.instance.pool.gpus * us, 0)

    def _end(self, now: float) -> float:
        return now if self.ended_at is None else min(self.ended_at, now)

    def needs_no_other(self, now: float) -> bool:
        """Return whether no other one is requested for it: it is usable, or soon will be again."""
        if self.absent_since is None or now >= self.absent_since + RETURN_S:
            return self.is_live
        return replace(self, absent_since=None).is_live

    @property
    def is_live(self) -> bool:
        """Whether it is usable: it stays, and its node is not quarantined."""
        return self.is_staying and not self.is_out

    @property
    def is_staying(self) -> bool:
        """Whether it is up, its agent present, not draining, not marked for deletion."""
        is_up = self.instance.state in ("pending", "running") and self.ended_at is None
        is_going = self.is_leaving or self.is_drained or self.is_retiring
        is_well = not is_going and self.absent_since is None
        return is_up and is_well and not self.why
