"""The ledger by day and by job: both sum to the ledger, whoever leads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.codec import decode, encode
from agents.protocol.records import JobId
from sailord.goodput.core.ledger import (
    IN_STEP,
    Account,
    CauseLoad,
    Ledger,
    OtherJobLoads,
    StepProgress,
    UsageSample,
)
from sailord.goodput.core.ledger import fold as folded
from sailord.goodput.core.shares import (
    DAY_US,
    KEPT_MAX,
    Share,
    Shares,
    difference,
    divided,
    newest_first,
    rest_of,
    resumed,
    too_many,
)
from tests.sailord.goodput.core.test_ledger import JOB, samples

OTHER, THIRD = JobId("other"), JobId("third")
MIDNIGHT = 20_000 * 86_400.0
"""A Friday, 2024-10-04."""
TRAINING = (CauseLoad("training", 8, 36.0),)


def played(*seen: UsageSample, shares: Shares | None = None) -> tuple[Ledger, Shares]:
    ledger, found = Ledger(), shares or {}
    for sample in seen:
        old, ledger = ledger, folded(ledger, sample)
        found = divided(found, old, ledger)
    return ledger, found


def sums(shares: Shares, kind: str) -> dict[str, dict[str, int]]:
    """GPU seconds by share and cause."""
    return {
        each.name: {account.cause: account.gpu_us // 10**6 for account in each.accounts}
        for each in shares.values()
        if each.kind == kind
    }


@given(samples(), st.lists(st.sampled_from((None, JOB, OTHER)), min_size=12, max_size=12))
def test_days_and_jobs_sum_to_the_ledger_exactly(
    seen: list[tuple[UsageSample, bool]], jobs: list[JobId | None]
) -> None:
    ledger, shares = Ledger(), {}
    for (sample, is_new_leader), job in zip(seen, jobs, strict=False):
        if is_new_leader:
            ledger = decode(Ledger, encode(ledger))
            shares = resumed([decode(Share, encode(each)) for each in shares.values()], ledger)
        own = [load for load in sample.loads if not load.rented_gpus and load.cause != IN_STEP]
        beside = (OtherJobLoads(THIRD, tuple(own)),) if job == JOB else ()
        old, ledger = ledger, folded(ledger, replace(sample, job=job, beside=beside))
        shares = divided(shares, old, ledger)
        for kind in ("day", "job"):
            for rest in rest_of(shares, kind, ledger):
                assert (rest.gpu_us, rest.unpriced_gpu_us) == (0, 0)
                assert rest.usd == pytest.approx(0, abs=1e-6)
            under_way = [
                each for each in shares.values()
                if each.kind == kind and any(a.cause == IN_STEP for a in each.accounts)
            ]  # fmt: skip
            assert len(under_way) <= 1
            for each in shares.values():
                assert all(a.gpu_us >= 0 for a in each.accounts), each


def test_time_belongs_to_the_job_that_had_the_cluster_and_to_its_day() -> None:
    _, shares = played(
        UsageSample(MIDNIGHT - 40, TRAINING, job=JOB),
        UsageSample(MIDNIGHT - 10, TRAINING, job=JOB),
        UsageSample(MIDNIGHT + 30, (CauseLoad("no_job", 8),), job=None),
        UsageSample(MIDNIGHT + 40, TRAINING, job=OTHER),
    )
    assert sums(shares, "day") == {
        "2024-10-03": {"training": 8 * 40},
        "2024-10-04": {"training": 8 * 30, "no_job": 8 * 10},
    }
    assert sums(shares, "job") == {"job": {"training": 8 * 70}, "": {"no_job": 80}}
    newest, oldest = newest_first(shares, "day")
    assert newest.since_us == (MIDNIGHT - 10) * 1e6
    assert oldest.until_us == (MIDNIGHT + 30) * 1e6
    # $36 an hour.
    assert sum(each.usd for each in oldest.accounts) == pytest.approx(0.4)


def test_a_step_over_midnight_is_booked_on_both_days_once_it_has_ended() -> None:
    """In proportion to the time since the last sample, not to the step's."""
    step = StepProgress(JOB, 1, 5, 0, usual_s=20.0)
    loads = (CauseLoad(IN_STEP, 8, 36.0),)
    seen = [
        UsageSample(MIDNIGHT - 15, loads, step, job=JOB),
        UsageSample(MIDNIGHT - 5, loads, step, job=JOB),
    ]
    _, before = played(*seen)
    assert sums(before, "day") == {"2024-10-03": {IN_STEP: 80}}
    ledger, after = played(
        *seen, UsageSample(MIDNIGHT + 5, loads, replace(step, number=6), job=JOB)
    )
    assert sums(after, "day") == {"2024-10-03": {"training": 80}, "2024-10-04": {"training": 80}}
    assert not rest_of(after, "day", ledger)


def test_days_without_a_leader_get_their_part_each() -> None:
    _, shares = played(
        UsageSample(MIDNIGHT - 3600, TRAINING, job=JOB),
        UsageSample(MIDNIGHT + 86_400 + 7200, TRAINING, job=JOB),
    )
    assert sums(shares, "day") == {
        "2024-10-03": {"unobserved": 8 * 3600},
        "2024-10-04": {"unobserved": 8 * 86_400},
        "2024-10-05": {"unobserved": 8 * 7200},
    }


def test_a_clock_that_jumps_by_years_makes_no_more_days_than_are_kept() -> None:
    begun, now = MIDNIGHT - 1_000 * 86_400, MIDNIGHT + 3_600
    ledger, shares = played(UsageSample(begun, TRAINING), UsageSample(now, ()))
    days = newest_first(shares, "day")
    assert len(days) <= KEPT_MAX["day"] + 2
    assert days[0].accounts == (Account("unobserved", 8 * 3_600 * 10**6, 36.0),)
    assert rest_of(shares, "day", ledger) == ()


def test_bookings_of_an_older_sailord_are_the_rest() -> None:
    """Its ledger names no job, and it leaves the shares as they are."""
    step = StepProgress(JOB, 1, 5, 0)
    loads = (CauseLoad(IN_STEP, 8),)
    seen = [UsageSample(MIDNIGHT + at, loads, step, job=JOB) for at in (0, 10)]
    _, shares = played(*seen)
    later = replace(step, number=6)
    ledger, _ = played(
        *seen, UsageSample(MIDNIGHT + 15, loads, later), UsageSample(MIDNIGHT + 16, loads, later)
    )
    shares = resumed(shares.values(), ledger)
    assert sums(shares, "day") == {"2024-10-04": {}}
    rest = {each.cause: each.gpu_us // 10**6 for each in rest_of(shares, "day", ledger)}
    assert rest == {"training": 8 * 15, IN_STEP: 8}
    old = decode(Ledger, encode(Ledger(1, 2)).replace(b'"job"', b'"unknown"'))
    assert old.job is None


def test_the_oldest_shares_are_not_kept() -> None:
    days = [Share("day", f"day {n}", n * DAY_US, (n + 1) * DAY_US) for n in range(70)]
    shares = {each.key: each for each in days}
    gone = too_many(shares)
    assert len(shares) - len(gone) == KEPT_MAX["day"]
    assert ("day", "day 0") in gone
    assert ("day", "day 69") not in gone


def test_a_difference_leaves_out_what_is_equal() -> None:
    some = Account("training", 5, 1.0), Account("held", 2, 0.5)
    assert difference(some, some[1:]) == (some[0],)


def test_jobs_that_share_are_each_booked_with_their_own_gpus() -> None:
    """A step under way belongs to the first job alone."""
    under_way = CauseLoad(IN_STEP, 3, 6.0)
    other, idle = CauseLoad("training", 2, 4.0), CauseLoad("unused", 1, 2.0)
    beside = (OtherJobLoads(OTHER, (other,)), OtherJobLoads(JobId(""), (idle,)))
    seen = [
        UsageSample(
            MIDNIGHT + s,
            (under_way, other, idle),
            StepProgress(JOB, 1, n, 0),
            job=JOB,
            beside=beside,
        )
        for s, n in ((0, 1), (10, 2), (15, 2))
    ]
    ledger, shares = played(*seen)
    assert sums(shares, "job") == {
        JOB: {"training": 30, IN_STEP: 15}, OTHER: {"training": 30}, "": {"unused": 15},
    }  # fmt: skip
    assert rest_of(shares, "job", ledger) == ()
    later = replace(seen[-1], at=MIDNIGHT + 315)
    assert sums(played(*seen, later)[1], "job")[OTHER] == {"training": 30, "unobserved": 600}
