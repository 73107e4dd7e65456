"""A job's cost is summed up across leaders, and a spent budget holds the job."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Bill, GenerationRecord, JobRecord
from sailord.core.model.commands import WriteGeneration, WriteJob
from sailord.core.model.events import Elected, Event, GenerationWritten, Ticked
from sailord.core.model.phases import Closing, Held, Opening, Running
from sailord.core.model.rule import Step
from sailord.core.model.state import State
from sailord.core.queries.job_cost import WRITTEN_EVERY_S, billed, charge, over_budget, priced
from sailord.notify.outbox import job_stopped
from tests.sailord.core.states import (
    BEGAN,
    G4,
    JOB,
    NOW,
    WAITING,
    A,
    B,
    G,
    act,
    active_of,
    job,
    node,
    order,
    phase,
    proposal,
    state,
)

PRICED = replace(G, usd_per_hour=36.0)
"""One cent a second."""


def bill_of(known: State) -> Bill:
    return known.job.bill


def written(commands: tuple[object, ...]) -> list[JobRecord]:
    return [command.job for command in commands if isinstance(command, WriteJob)]


def at(known: State, event: Event) -> tuple[Bill, list[JobRecord]]:
    after, commands = act(known, event)
    return bill_of(after), written(commands)


def running(record: GenerationRecord = PRICED, **bill: float) -> State:
    return state(Running(BEGAN), generation=record, job=job(bill=Bill(until=NOW, **bill)))


def test_bill_is_written_every_ten_seconds() -> None:
    soon, orders = at(running(), Ticked(NOW + WRITTEN_EVERY_S - 1))
    assert (soon, orders) == (Bill(until=NOW), [])
    later, (order_,) = at(running(), Ticked(NOW + 20))
    assert later == order_.bill == Bill(usd=0.2, until=NOW + 20)


def test_rate_changes_with_the_generation() -> None:
    following = replace(G4, usd_per_hour=72.0)
    opening = state(
        Opening(following, proposal()), generation=PRICED, job=job(bill=Bill(until=NOW))
    )
    after, commands = act(opening, GenerationWritten(NOW + 5, following))
    assert written(commands)[0].bill == bill_of(after) == Bill(usd=0.05, until=NOW + 5)
    assert round(billed(after.job, following, NOW + 6).usd, 9) == 0.07


def test_new_leader_continues_the_stored_bill() -> None:
    stored = job(bill=Bill(usd=1.0, until=NOW - 100))
    elected = Elected(NOW, 8, nodes=(), jobs=(stored,), generations=(PRICED,))
    bill, (order_,) = at(State(), elected)
    assert bill == order_.bill
    assert round(bill.usd, 9) == 2.0


def test_a_bill_of_a_leader_whose_clock_was_ahead_goes_on_at_once() -> None:
    """The head's clock was set back by an hour: what the job costs until then counts."""
    stored = job(bill=Bill(usd=1.0, until=NOW + 3600))
    led, _ = act(State(), Elected(NOW, 8, nodes=(), jobs=(stored,), generations=(PRICED,)))
    assert bill_of(led) == Bill(usd=1.0, until=NOW)
    later, _ = at(led, Ticked(NOW + 100))
    assert round(later.usd, 9) == 2.0


def test_a_closed_generation_costs_nothing() -> None:
    closed = replace(PRICED, state="closed")
    closing = state(Closing("paused", "x"), generation=PRICED, job=job(bill=Bill(until=NOW)))
    after, commands = act(closing, GenerationWritten(NOW + 3, closed))
    (record,) = written(commands)
    assert record.bill == Bill(usd=0.03, until=NOW + 3)
    assert billed(record, closed, NOW + 1000).usd == record.bill.usd
    assert after.active is None


def test_unpriced_time_is_counted() -> None:
    unpriced = replace(G, usd_per_hour=None)
    record = job(bill=Bill(until=NOW))
    assert billed(record, unpriced, NOW + 9) == Bill(until=NOW + 9, unpriced_s=9.0)


def test_lost_nodes_of_a_waiting_job_cost_nothing_more() -> None:
    """It waited for eleven minutes with two nodes, and paid for five."""
    lost = node(B, lost_at=NOW, why_lost="x")
    bill = Bill(until=NOW - 10)
    alive = state(Running(BEGAN), generation=PRICED, job=job(bill=bill))
    waits = state(WAITING, node(A), lost, generation=PRICED, job=job(bill=bill), is_refused=True)
    step = charge(alive, waits)
    assert bill_of(step.state) == Bill(usd=0.1, until=NOW), "the rate changes: it is charged"
    later = replace(step.state, now=NOW + 20)
    assert bill_of(charge(step.state, later).state) == Bill(usd=0.2, until=NOW + 20)
    assert over_budget(replace(later, jobs={JOB: job(bill=Bill(0.0, NOW, usd_max=0.15))})) == ""
    bigger = replace(lost, record=replace(lost.record, gpus=3))
    known = state(WAITING, node(A), bigger, generation=PRICED)
    assert priced(known, PRICED).usd_per_hour == 36.0 / 4


def test_node_that_a_new_leader_knows_by_name_only_counts_as_the_others_do() -> None:
    eight, nameless = node(A), node(B, lost_at=NOW, why_lost="x")
    eight = replace(eight, record=replace(eight.record, gpus=8))
    nameless = replace(nameless, record=replace(nameless.record, gpus=0))
    known = state(WAITING, eight, nameless, generation=PRICED)
    assert priced(known, PRICED).usd_per_hour == 36.0 / 2


def test_spent_budget_holds_the_job() -> None:
    """Money spent is never more than the budget and one decision's time."""
    budget = running(usd=9.95, usd_max=10.0)
    before, orders = act(budget, Ticked(NOW + 4.9))
    assert isinstance(phase(before), Running)
    assert not [each for each in orders if isinstance(each, WriteGeneration)]
    after, commands = act(budget, Ticked(NOW + 5.0))
    why = "its budget of $10.00 is spent"
    assert phase(after) == Closing("held", why)
    closed = replace(PRICED, state="closed", reason=why)
    assert WriteGeneration(closed, replaces=PRICED) in commands
    held, commands = act(after, GenerationWritten(NOW + 5.1, closed))
    assert phase(held) == Held(why, NOW + 5.1)
    assert written(commands)[-1].reason == why


def test_a_resume_leaves_an_overspent_job_held() -> None:
    closed = replace(PRICED, state="closed")
    record = job(state="held", bill=Bill(usd=10.0, until=NOW, usd_max=10.0))
    held = state(Held("x", NOW), generation=closed, job=record, orders=(order("resume", JOB),))
    after, _ = act(held, Ticked(NOW + 1))
    assert phase(after) == Held("x", NOW)
    assert not active_of(after).orders


def test_a_job_without_a_budget_goes_on() -> None:
    after, _ = act(running(usd=1e9), Ticked(NOW + 1))
    assert isinstance(phase(after), Running)
    assert A in active_of(after).generation.members


def test_nodes_that_leave_a_held_job_change_neither_its_record_nor_its_message() -> None:
    """Each change of the record would tell receivers again that the job is held."""
    closed = replace(PRICED, state="closed")
    held = job(state="held", reason="no plan", bill=Bill(usd=1.0, until=NOW))
    before = state(Held("no plan", NOW), node(A), node(B), job=held, generation=closed)
    after = replace(before, now=NOW + 5, nodes=before.nodes.with_({A: node(A, lost_at=NOW + 5)}))
    assert charge(before, after) == Step(after)
    messages = [job_stopped(replace(held, bill=Bill(usd=usd)), NOW, 1) for usd in (1.0, 2.0)]
    assert messages[0] == messages[1]
    again = replace(held, past=replace(held.past, held_at=NOW + 9))
    assert job_stopped(again, NOW, 1) != messages[0]
