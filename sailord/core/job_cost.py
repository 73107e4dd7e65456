"""What a job has cost so far: pure sums over the generations that ran, kept in the job's record.

A generation costs what its plan's devices cost an hour, from its opening to its end, whoever
leads meanwhile and whether or not it trains. The sum is written now and then and whenever the
rate changes; in between, the rate and the time since tell the rest.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Bill, GenerationRecord, JobRecord
from sailord.core.rule import Step, write_job
from sailord.core.state import State

WRITTEN_EVERY_S = 10.0


def charge(before: State, after: State) -> Step:
    """Write down what was spent since the last time, if it is time or the rate is another one."""
    active = after.active
    if active is None or active.generation is None:
        return Step(after)
    then = before.active
    is_same_job = then is not None and then.job == active.job
    ran = then.generation if then is not None and is_same_job else active.generation
    until = after.job.bill.until
    if ran == active.generation:
        is_due = until is None or after.now >= until + WRITTEN_EVERY_S
        if ran.usd_per_hour is None or not is_due or not costs(ran):
            return Step(after)
    bill = billed(after.job, ran, after.now)
    return write_job(after, replace(after.job, bill=bill))


def costs(record: GenerationRecord | None) -> bool:
    """Whether money runs while this generation is the last."""
    return record is not None and record.state != "closed"


def billed(job: JobRecord, ran: GenerationRecord | None, now: float) -> Bill:
    """The bill up to now, where ``ran`` was the generation since it was last written."""
    bill = job.bill
    if ran is None or not costs(ran) or bill.until is None:
        return replace(bill, until=now)
    seconds = max(now - bill.until, 0.0)
    if ran.usd_per_hour is None:
        return replace(bill, until=now, unpriced_s=bill.unpriced_s + seconds)
    return replace(bill, until=now, usd=bill.usd + ran.usd_per_hour * seconds / 3600)


def over_budget(state: State) -> str:
    """Say so where the active job has spent what it may; empty where it has not."""
    active = state.active
    if active is None or state.job.bill.usd_max is None:
        return ""
    bill = billed(state.job, active.generation, state.now)
    assert bill.usd_max is not None
    if bill.usd < bill.usd_max:
        return ""
    return f"its budget of ${bill.usd_max:,.2f} is spent"
