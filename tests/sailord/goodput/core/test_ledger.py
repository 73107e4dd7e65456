"""The ledger: every paid second belongs to one cause, whatever happens in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.codec import decode, encode
from agents.protocol.records import JobId
from sailord.goodput.core.causes import TEXTS, Cause, label_of
from sailord.goodput.core.ledger import (
    GAP_S,
    IN_STEP,
    Account,
    CauseLoad,
    Ledger,
    StepProgress,
    UsageSample,
    fold,
)

JOB = JobId("job")
causes = st.sampled_from(sorted(TEXTS))
usd = st.floats(0, 100)


@st.composite
def loads(draw: st.DrawFn) -> tuple[CauseLoad, ...]:
    held = draw(st.lists(causes, unique=True, max_size=4))
    return tuple(
        CauseLoad(
            *(cause, n := draw(st.integers(0, 64)), draw(usd), draw(usd)),
            *(draw(st.integers(0, n)), draw(st.integers(0, n))),
        )
        for cause in held
    )


steps = st.none() | st.builds(
    StepProgress,
    st.sampled_from((JOB, JobId("other"))),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(0, 20),
    st.sampled_from((0.0, 0.5, 3.0)),
    st.none() | st.floats(0, 200),
    st.floats(0, 3),
    st.floats(0, 3),
)
ENDINGS: tuple[Cause, ...] = ("moving_detect", "moving_quiesce")


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[UsageSample, bool]]:
    """Moments with random gaps, some at a clock set back, each with or without a change of leader;
    and bills that may be corrected downwards."""
    at, found = 1e9, []
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from((0.0, 1e-6, 0.3, 7.0, 119.0, 3600.0, -5.0)))
        bill = draw(st.none() | st.floats(0, 1000))
        gpu_bill = draw(st.none() | st.integers(0, 10**10))
        ended_by = draw(st.sampled_from(ENDINGS))
        sample = UsageSample(at, draw(loads()), draw(steps), ended_by, bill, gpu_bill)
        found.append((sample, draw(st.booleans())))
    return found


@given(samples())
def test_causes_sum_to_the_wall_clock_exactly_and_dollars_to_the_bill(
    seen: list[tuple[UsageSample, bool]],
) -> None:
    ledger, before = Ledger(), None
    gpu_us = unpriced_us = rented_us = 0
    usd = 0.0
    bill_from = bill = gpu_bill_from = gpu_bill = None
    for sample, is_new_leader in seen:
        known = ledger
        ledger = fold(ledger, sample)
        for account in known.accounts:
            if account.cause != IN_STEP:
                later = ledger.account(account.cause)
                assert later.gpu_us >= account.gpu_us, "a sum has shrunk"
                assert later.usd >= account.usd, "a sum of dollars has shrunk"
        if before is not None:
            passed_us = max(round(sample.at * 1e6) - round(before.at * 1e6), 0)
            gpu_us += sum(each.gpus - each.rented_gpus for each in before.loads) * passed_us
            if gpu_bill_from is None:  # Seen, while no bill was known.
                gpu_us += sum(each.rented_gpus for each in before.loads) * passed_us
            elif sample.bill_gpu_us is None:
                rented_us += sum(each.rented_gpus for each in before.loads) * passed_us
            else:
                rented_us = max(rented_us, sample.bill_gpu_us - gpu_bill_from)
            unpriced_us += sum(each.unpriced_gpus for each in before.loads) * passed_us
            usd += sum(each.usd_per_hour for each in before.loads) * passed_us / 3.6e9
        bill_from = sample.bill_usd if bill_from is None else bill_from
        bill = bill if sample.bill_usd is None else sample.bill_usd
        gpu_bill_from = sample.bill_gpu_us if gpu_bill_from is None else gpu_bill_from
        gpu_bill = gpu_bill if sample.bill_gpu_us is None else sample.bill_gpu_us
        before = sample
        if is_new_leader:
            ledger = decode(Ledger, encode(ledger))
    assert sum(each.gpu_us for each in ledger.accounts) == gpu_us + rented_us
    if gpu_bill is not None and gpu_bill_from is not None:
        assert ledger.ahead_us == max(rented_us - (gpu_bill - gpu_bill_from), 0)
    assert sum(each.unpriced_gpu_us for each in ledger.accounts) == unpriced_us
    assert all(each.gpu_us >= 0 for each in ledger.accounts)
    booked = sum(each.usd for each in ledger.accounts)
    billed = 0.0 if bill is None or bill_from is None else bill - bill_from
    if billed >= 0:
        assert booked - ledger.ahead_usd == pytest.approx(usd + billed, abs=1e-6)


def run(*samples: UsageSample, ledger: Ledger | None = None) -> dict[Cause, float]:
    """GPU seconds by cause."""
    ledger = ledger or Ledger()
    for each in samples:
        ledger = fold(ledger, each)
    return {each.cause: each.gpu_us / 1e6 for each in ledger.accounts}


HELD = (CauseLoad(IN_STEP, 4, 40.0),)
FIRST = StepProgress(JOB, 1, number=5, first=0, usual_s=2.0, busy_s=4.0, stall_s=0.1, slow_s=0.2)


def at_step(number: int, **others: Any) -> StepProgress:
    return replace(FIRST, number=number, **others)


def test_a_finished_step_is_split_by_what_its_ranks_measured() -> None:
    found = run(UsageSample(100.0, HELD, at_step(5)), UsageSample(102.0, HELD, at_step(6)))
    # 8 GPU seconds: 4 of computing, 4 x 0.1 of stall, 4 x 0.2 of waiting for a straggler.
    assert found == {
        "training": 4.0, "checkpoint_stall": 0.4, "slow_node": 0.8, "idle_in_plan": 2.8,
    }  # fmt: skip


def test_without_measurements_a_step_is_training() -> None:
    plain = at_step(5, busy_s=None, stall_s=0.0, slow_s=0.0)
    assert run(UsageSample(1.0, HELD, plain), UsageSample(3.0, HELD, replace(plain, number=6))) == {
        "training": 8.0
    }


def test_a_step_that_never_ended_is_booked_on_the_detection_of_the_loss() -> None:
    waits = (CauseLoad("moving_plan", 3, 30.0),)
    found = run(
        UsageSample(100.0, HELD, at_step(5)),
        UsageSample(101.0, HELD, at_step(5)),
        UsageSample(112.0, waits, None),
        UsageSample(113.0, waits, None),
    )
    assert found == {"moving_detect": 48.0, "moving_plan": 3.0}


def test_steps_repeated_after_a_loss_are_booked_on_recovering() -> None:
    moved = {"generation": 2, "first": 3, "usual_s": 0.0, "stall_s": 0.0, "slow_s": 0.0}
    found = run(
        UsageSample(100.0, HELD, at_step(5)),
        UsageSample(100.0, HELD, at_step(3, **moved)),
        UsageSample(108.0, HELD, at_step(7, **moved)),
    )
    # Of four steps two were done before.
    assert found == {"recovering": 16.0, "training": 16.0}


def test_the_first_step_of_a_generation_costs_what_it_takes_beyond_a_usual_one() -> None:
    begun = at_step(0, busy_s=None, stall_s=0.0, slow_s=0.0)
    found = run(UsageSample(100.0, HELD, begun), UsageSample(110.0, HELD, replace(begun, number=1)))
    assert found == {"moving_first_step": 32.0, "training": 8.0}


def test_time_without_a_leader_is_unobserved_and_belongs_to_no_step() -> None:
    plain = at_step(5, busy_s=None, stall_s=0.0, slow_s=0.0)
    gap = GAP_S + 1
    found = run(UsageSample(0.0, HELD, plain), UsageSample(gap, HELD, plain),
                UsageSample(gap + 2, HELD, replace(plain, number=6)))  # fmt: skip
    assert found == {"unobserved": 4 * gap, "training": 8.0}


def test_later_bookings_use_up_a_corrected_bill() -> None:
    up = (CauseLoad("training", 8, 0.0, 30.0),)
    ledger = Ledger()
    for at, bill in ((0.0, 5.0), (60.0, 6.0), (120.0, 5.9), (180.0, 6.5)):
        ledger = fold(ledger, UsageSample(at, up, bill_usd=bill))
        if at == 120.0:
            assert ledger.ahead_usd == pytest.approx(0.1)
    assert ledger.account("training").usd == pytest.approx(1.5)
    assert ledger.ahead_usd == 0


def test_time_of_an_instance_that_had_ended_is_made_up_for_by_later_bookings() -> None:
    three = (CauseLoad("unused", 3, rented_usd_per_hour=3.0, rented_gpus=3),)
    one = (CauseLoad("held", 5), CauseLoad("unused", 1, rented_usd_per_hour=1.0, rented_gpus=1))
    ledger = Ledger()
    # At 111 two of them turn out to have ended at 104.
    for at, loads, bill_s in ((100.0, three, 0), (110.0, three, 30), (111.0, one, 3 * 4 + 7)):
        ledger = fold(ledger, UsageSample(at, loads, bill_gpu_us=bill_s * 10**6))
    assert ledger.account("unused").gpu_us == 30e6, "a sum never shrinks"
    assert ledger.ahead_us == 2 * 7e6 - 3e6
    ledger = fold(ledger, UsageSample(131.0, one, bill_gpu_us=(3 * 4 + 27) * 10**6))
    assert ledger.ahead_us == 0
    assert ledger.account("unused").gpu_us == (3 * 4 + 27) * 1e6
    assert ledger.account("held").gpu_us == 5 * 20e6, "what nobody rents is not made up with"


def test_growth_of_the_bill_beyond_what_was_seen_is_the_boot_of_a_new_instance() -> None:
    seen = (CauseLoad("held", 2, rented_gpus=2),)
    samples = (
        UsageSample(at, seen, bill_gpu_us=us * 10**6) for at, us in ((100.0, 0), (110.0, 26))
    )
    assert run(*samples) == {
        "held": 20.0, "booting": 6.0,
    }  # fmt: skip


def test_an_instance_that_ended_takes_its_part_of_each_cause() -> None:
    seen = (CauseLoad("held", 2, rented_gpus=2), CauseLoad("unused", 4, rented_gpus=1))
    samples = (
        UsageSample(at, seen, bill_gpu_us=us * 10**6) for at, us in ((100.0, 0), (110.0, 15))
    )
    assert run(*samples) == {
        "held": 10.0, "unused": 35.0,
    }  # fmt: skip


def test_the_stored_ledger_stays_small() -> None:
    full = Ledger(1, 2**60, tuple(Account(cause, 2**60, 1e9 / 3, 2**60) for cause in TEXTS),
                  tuple(CauseLoad(c, 10**6, 1e6 / 3, 1e6 / 3) for c in TEXTS), FIRST)  # fmt: skip
    assert len(encode(full)) < 8_000


def test_causes_are_shown_in_the_words_of_the_documents() -> None:
    assert label_of("leaving") == "draining"
    assert label_of("idle_in_plan") == "waiting within steps"
    assert label_of("moving_first_step") == "reconfiguring: first step"
