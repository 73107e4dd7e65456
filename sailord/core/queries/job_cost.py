"""The cost of a job so far, kept in its record, and whether it is over the job's budget.

A generation costs what its plan's devices and predicted egress cost per hour, from its opening to
its end, whether or not it trains; lost nodes cost nothing more. The sum is stored every
``WRITTEN_EVERY_S`` and whenever the rate changes; in between, it follows from the rate and the time
since.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Bill, GenerationRecord, JobId, JobRecord
from sailord.core.model.rule import Step, write_job
from sailord.core.model.state import State

WRITTEN_EVERY_S = 10.0


def charge(before: State, after: State) -> Step:
    """Add the cost since the last charge to the job's bill, if it is due or the rate changed."""
    active = after.active
    if active is None or active.generation is None:
        return Step(after)
    then = before.active
    is_same_job = then is not None and then.job == active.job
    charged = current = priced(after, active.generation)
    if then is not None and is_same_job:
        charged = priced(before, then.generation)
    until = after.job.bill.until
    if charged == current and charged is not None:
        # A bill from the future is of a leader whose clock was ahead.
        is_due = until is None or not until <= after.now < until + WRITTEN_EVERY_S
        if charged.usd_per_hour is None or not is_due or not is_billed(charged):
            return Step(after)
    elif None not in (charged, current) and not (is_billed(charged) or is_billed(current)):
        return Step(after)  # A node of a closed generation is gone.
    bill = billed(after.job, charged, after.now)
    return write_job(after, replace(after.job, bill=bill))


def is_billed(record: GenerationRecord | None) -> bool:
    """Return whether this generation still costs money."""
    return record is not None and record.state != "closed"


def priced(state: State, record: GenerationRecord | None) -> GenerationRecord | None:
    """Return the generation at the price of those of its nodes that are not lost.

    The record has one price for all of them, so each GPU counts the same.
    """
    if record is None or record.usd_per_hour is None:
        return record
    notable = state.nodes.notable.intersection(record.members)
    lost = frozenset(id_ for id_ in notable if state.nodes[id_].is_lost)
    if not lost:
        return record
    known = {
        id_: state.nodes[id_].record.gpus
        for id_ in record.members
        if id_ in state.nodes and state.nodes[id_].record.gpus
    }
    # A new leader knows only the name of a node that it has not heard of yet.
    usual = sum(known.values()) / len(known) if known else 1.0
    gpus = {id_: known.get(id_, usual) for id_ in record.members}
    share = sum(count for id_, count in gpus.items() if id_ not in lost) / sum(gpus.values())
    return replace(record, usd_per_hour=record.usd_per_hour * share)


def billed(job: JobRecord, ran: GenerationRecord | None, now: float) -> Bill:
    """Return the bill up to now; ``ran`` is the generation to charge for, as ``priced``."""
    bill = job.bill
    if ran is None or not is_billed(ran) or bill.until is None:
        return replace(bill, until=now)
    seconds = max(now - bill.until, 0.0)
    if ran.usd_per_hour is None:
        return replace(bill, until=now, unpriced_s=bill.unpriced_s + seconds)
    return replace(bill, until=now, usd=bill.usd + ran.usd_per_hour * seconds / 3600)


def over_budget(state: State) -> str:
    """Return why the active job may not go on; empty if its budget is not spent."""
    active = state.active
    if active is None or state.job.bill.usd_max is None:
        return ""
    return why_unpaid(billed(state.job, priced(state, active.generation), state.now))


def why_not_afforded(state: State, id_: JobId) -> str:
    """Return why the budget of a job does not pay for going on; empty if it does."""
    active = state.active
    is_active = active is not None and active.job == id_
    last = active.generation if active is not None and is_active else state.generations.get(id_)
    rate = None if last is None else last.usd_per_hour
    return why_unpaid(bill_now(state, state.jobs[id_]), rate, state.options.reserve_s)


def bill_now(state: State, job: JobRecord) -> Bill:
    """Return the bill of a job up to now."""
    active = state.active
    if active is None or active.job != job.id:
        return job.bill
    return billed(job, priced(state, active.generation), state.now)


def why_unpaid(bill: Bill, usd_per_hour: float | None = None, reserve_s: float = 0.0) -> str:
    """Return why a job may not go on by its bill; empty if it may.

    Where sailord rents, the money for the last ``reserve_s`` is kept for saving its state.
    """
    if bill.usd_max is None:
        return ""
    left = bill.usd_max - bill.usd
    if left <= 0:
        return f"its budget of ${bill.usd_max:,.2f} is spent"
    if left > (usd_per_hour or 0.0) * reserve_s / 3600:
        return ""
    spent = f"${bill.usd:,.2f} of its budget of ${bill.usd_max:,.2f} are spent"
    return f"{spent}, and the rest pays only for saving its state"
