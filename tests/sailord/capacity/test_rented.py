"""What others ask of the capacity loop is answered before it exists, and follows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from agents.protocol.records import JobId
from sailord.capacity.core.model import CapacityPolicy, Pace
from sailord.capacity.loop import CapacityLoop
from sailord.capacity.rented import RentedNow

JOB, OTHER = JobId("job"), JobId("other")


def test_deadlines_are_nobodys_until_the_loop_watches_one() -> None:
    rented, nothing = RentedNow(), list[Any]([None])
    is_behind, keeps_deadline = rented.is_behind, rented.keeps_deadline
    assert not is_behind(JOB)
    assert not keeps_deadline(JOB)
    clock: Any = SimpleNamespace(now=lambda: 0.0)
    loop = CapacityLoop(None, *nothing, CapacityPolicy(), *3 * nothing, clock, rented=rented)  # type: ignore[arg-type] # nothing runs
    assert not keeps_deadline(JOB)
    loop.state = replace(loop.state, pace=Pace("job", uses_on_demand=True))
    assert [is_behind(JOB), keeps_deadline(JOB)] == [True, True]
    assert [is_behind(OTHER), keeps_deadline(OTHER)] == [False, False]
