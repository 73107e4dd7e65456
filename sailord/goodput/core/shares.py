"""The ledger by day and by job: what each fold has booked, divided among days and jobs.

Whatever the ledger books is booked once on a day (UTC), and once on the job that had these GPUs, or
on none. So the days sum to the ledger, and so do the jobs, with a rest: what was booked before
there were shares, and what belongs to shares that are not kept any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from sailord.goodput.core.ledger import IN_STEP, Account, Ledger, booked_beside

ShareKind = Literal["day", "job"]
ShareKey = tuple[ShareKind, str]
KEPT_MAX: Mapping[ShareKind, int] = {"day": 62, "job": 50}
"""Shares that are kept of each kind, the last ones."""
DAY_US = 86_400_000_000
NO_JOB = ""
"""The name of the share without a job."""
TINY_USD = 1e-12
"""A smaller difference of two floats is a rounding error."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the ledger that belongs to one day or to one job; stored for the next leader."""

    kind: ShareKind
    name: str
    """The day, such as ``2026-05-01``, or the job's id."""
    since_us: int
    until_us: int
    accounts: tuple[Account, ...] = ()

    @property
    def key(self) -> ShareKey:
        """What tells it from the others."""
        return self.kind, self.name


Shares = Mapping[ShareKey, Share]


def divided(shares: Shares, old: Ledger, new: Ledger) -> Shares:
    """The shares after a fold from one ledger to the next; unchanged ones are the same objects."""
    if old.since_us is None:
        return shares
    found = dict(shares)
    delta = difference(new.accounts, old.accounts)
    for day, part in _by_day(delta, old.until_us, new.until_us):
        _book(found, ("day", day), part, old, new)
    for job, part in booked_beside(old, new):
        _book(found, ("job", job), part, old, new)
        delta = difference(delta, part)
    # Booked last: what is left is of the first part's job, as is the step under way.
    _book(found, ("job", old.job or NO_JOB), delta, old, new)
    return found


def resumed(shares: Iterable[Share], ledger: Ledger) -> Shares:
    """The stored shares for a new leader.

    An older sailord books on the ledger alone: then these shares lack its step under way.
    """
    found = {each.key: each for each in shares}
    if max((each.until_us for each in found.values()), default=0) == ledger.until_us:
        return found
    return {key: replace(each, accounts=_without_step(each)) for key, each in found.items()}


def too_many(shares: Shares) -> frozenset[ShareKey]:
    """The shares that are not kept: the oldest of each kind beyond ``KEPT_MAX``."""
    found: list[ShareKey] = []
    for kind, most in KEPT_MAX.items():
        found += [each.key for each in newest_first(shares, kind)[most:]]
    return frozenset(found)


def newest_first(shares: Shares, kind: ShareKind) -> list[Share]:
    """The shares of one kind."""
    some = (each for each in shares.values() if each.kind == kind)
    return sorted(some, key=lambda each: (each.until_us, each.name), reverse=True)


def rest_of(shares: Shares, kind: ShareKind, ledger: Ledger) -> tuple[Account, ...]:
    """What the ledger has beyond the shares of a kind."""
    some = (share.accounts for share in shares.values() if share.kind == kind)
    return difference(ledger.accounts, itertools.chain.from_iterable(some))


def difference(some: Iterable[Account], others: Iterable[Account]) -> tuple[Account, ...]:
    """Accounts less others, by cause; without those that are empty."""
    return _total([*some, *(_scale(each, -1, 1) for each in others)])


def _book(
    found: dict[ShareKey, Share], key: ShareKey, part: Iterable[Account], old: Ledger, new: Ledger
) -> None:
    """Book on one share; the step under way belongs to the last share of its kind alone."""
    kind, name = key
    before = found.get(key, Share(kind, name, old.until_us, old.until_us))
    moved: list[Account] = []
    for other in [each for each in found.values() if each.kind == kind and each.key != key]:
        steps = [each for each in other.accounts if each.cause == IN_STEP]
        if steps:
            moved += steps
            found[other.key] = replace(other, accounts=_without_step(other))
    accounts = _total([*before.accounts, *moved, *part])
    found[key] = replace(before, accounts=accounts, until_us=new.until_us)


def _by_day(
    delta: tuple[Account, ...], from_us: int, until_us: int
) -> Iterator[tuple[str, tuple[Account, ...]]]:
    """Split what was booked in a time among its days, in proportion."""
    booked: tuple[Account, ...] = ()
    # A clock may jump by decades; older days would not be kept.
    kept_us = until_us // DAY_US * DAY_US - KEPT_MAX["day"] * DAY_US
    midnight = max((from_us // DAY_US + 1) * DAY_US, kept_us)
    while midnight < until_us:
        share = midnight - from_us, until_us - from_us
        upto = tuple(_scale(each, *share) for each in delta)
        yield _day(midnight - 1), difference(upto, booked)
        booked, midnight = upto, midnight + DAY_US
    yield _day(max(until_us - 1, from_us)), difference(delta, booked)


def _day(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).date().isoformat()


def _scale(each: Account, part: int, whole: int) -> Account:
    return Account(
        each.cause,
        each.gpu_us * part // whole,
        each.usd * part / whole,
        each.unpriced_gpu_us * part // whole,
    )


def _total(accounts: Iterable[Account]) -> tuple[Account, ...]:
    """One account for each cause, in a fixed order, without those that are empty."""
    sums: dict[str, Account] = {}
    for each in accounts:
        known = sums.get(each.cause, Account(each.cause))
        sums[each.cause] = Account(
            each.cause,
            known.gpu_us + each.gpu_us,
            known.usd + each.usd,
            known.unpriced_gpu_us + each.unpriced_gpu_us,
        )
    return tuple(
        each
        for _, each in sorted(sums.items())
        if each.gpu_us or each.unpriced_gpu_us or abs(each.usd) > TINY_USD
    )


def _without_step(share: Share) -> tuple[Account, ...]:
    return tuple(each for each in share.accounts if each.cause != IN_STEP)
