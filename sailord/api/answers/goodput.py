"""The goodput ledger as an answer: API, page and metrics all take their numbers from it."""

from __future__ import annotations

from sailord.api.answers.goodput_types import CauseView, GoodputView, ShareCause, ShareView
from sailord.goodput.core.causes import TEXTS, label_of
from sailord.goodput.core.last_hour import HOUR_US, MINUTES_US, LastHour
from sailord.goodput.core.ledger import Account, Ledger, gpus_of
from sailord.goodput.core.shares import ShareKind, Shares, newest_first, rest_of

NOTHING: Shares = {}
SMALL_USD = 1e-6
"""A smaller rest is a rounding error of the sums."""


def goodput_view(
    ledger: Ledger,
    shares: Shares = NOTHING,
    *,
    most: int | None = None,
    last_hour: LastHour | None = None,
) -> GoodputView:
    """Return the sums by cause, the largest first; and by day and job, at most ``most`` of each."""
    gpu_us = sum(each.gpu_us for each in ledger.accounts)
    wasted = [each for each in ledger.accounts if each.cause not in ("training", "step_under_way")]
    accounts = sorted(ledger.accounts, key=lambda each: (-each.gpu_us, -each.usd, each.cause))
    return GoodputView(
        since=None if ledger.since_us is None else ledger.since_us / 1e6,
        until=ledger.until_us / 1e6,
        gpus=gpus_of(ledger),
        gpu_s=(gpu_us - ledger.ahead_us) / 1e6,
        usd=sum(each.usd for each in accounts) - ledger.ahead_usd,
        usd_per_hour=sum(each.usd_per_hour + each.rented_usd_per_hour for each in ledger.loads),
        goodput=ledger.account("training").gpu_us / gpu_us if gpu_us else None,
        unpriced_gpu_s=sum(each.unpriced_gpu_us for each in accounts) / 1e6,
        ahead_usd=ledger.ahead_usd,
        ahead_gpu_s=ledger.ahead_us / 1e6,
        causes=tuple(
            CauseView(
                each.cause,
                TEXTS[each.cause],
                each.gpu_us / 1e6,
                each.usd,
                each.gpu_us / gpu_us if gpu_us else 0.0,
                label_of(each.cause),
            )
            for each in accounts
        ),
        not_training_gpu_s=sum(each.gpu_us for each in wasted) / 1e6,
        not_training_usd=sum(each.usd for each in wasted),
        days=_shares(ledger, shares, "day", most),
        jobs=_shares(ledger, shares, "job", most),
        last_hour=_sum_recent(ledger, last_hour, "last hour", HOUR_US),
        last_minutes=_sum_recent(ledger, last_hour, "last minutes", MINUTES_US),
    )


def _sum_recent(
    ledger: Ledger, last_hour: LastHour | None, name: str, within_us: int
) -> ShareView | None:
    since_us, accounts = (0, ()) if last_hour is None else last_hour.booked(ledger, within_us)
    if not accounts:
        return None
    return _share(name, accounts, (since_us / 1e6, ledger.until_us / 1e6))


def usd_per_hour_of(ledger: Ledger) -> float | None:
    """Return what all nodes cost an hour, used or not; ``None``: a price is not known."""
    if not ledger.loads or any(each.unpriced_gpus for each in ledger.loads):
        return None
    return sum(each.usd_per_hour + each.rented_usd_per_hour for each in ledger.loads)


def _shares(
    ledger: Ledger, shares: Shares, kind: ShareKind, most: int | None
) -> tuple[ShareView, ...]:
    """The shares of a kind, then the rest of the ledger that belongs to none of them, if any."""
    known = newest_first(shares, kind)
    found = [
        _share(each.name, each.accounts, (each.since_us / 1e6, each.until_us / 1e6))
        for each in known[:most]
    ]
    if len(found) < len(known):
        return tuple(found)
    rest = rest_of(shares, kind, ledger)
    if any(each.gpu_us or each.usd >= SMALL_USD for each in rest):
        found.append(_share("", rest, (None, None)))
    return tuple(found)


def _share(
    name: str, accounts: tuple[Account, ...], span: tuple[float | None, float | None]
) -> ShareView:
    gpu_us = sum(each.gpu_us for each in accounts)
    training_us = sum(each.gpu_us for each in accounts if each.cause == "training")
    return ShareView(
        name,
        *span,
        gpu_us / 1e6,
        sum(each.usd for each in accounts),
        training_us / gpu_us if gpu_us else None,
        tuple(
            ShareCause(each.cause, each.gpu_us / 1e6, each.usd)
            for each in sorted(accounts, key=lambda each: (-each.gpu_us, -each.usd, each.cause))
        ),
    )
