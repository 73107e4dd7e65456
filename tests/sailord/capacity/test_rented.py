"""What others ask of the capacity loop is answered before it exists, and follows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from agents.protocol.records import JobId
from sailord.capacity.core.deadline_model import DeadlineState
from sailord.capacity.core.model import CapacityPolicy, CapacityState
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.loop import CapacityLoop
from sailord.capacity.rented import RentedNow
from sailord.planning.messages import PoolPrice
from tests.sailord.capacity.core.story import A, B, instance

JOB, OTHER = JobId("job"), JobId("other")


def test_no_deadline_counts_as_watched_before_the_loop_watches_it() -> None:
    rented, nothing = RentedNow(), list[Any]([None])
    keeps_deadline = rented.keeps_deadline
    assert not keeps_deadline(JOB)
    clock: Any = SimpleNamespace(now=lambda: 0.0)
    loop = CapacityLoop(None, *nothing, CapacityPolicy(), *3 * nothing, clock, rented=rented)  # type: ignore[arg-type] # nothing runs
    assert not keeps_deadline(JOB)
    loop.state = replace(loop.state, pace=DeadlineState("job"))
    assert [keeps_deadline(JOB), keeps_deadline(OTHER)] == [True, False]


def test_instances_that_sailord_deletes_are_given_back_and_preempted_ones_are_not() -> None:
    made = [RentedInstance(instance(number), 1.0, 0.0, 0.0) for number in range(3)]
    stays, goes, taken = made[0], replace(made[1], why="surplus"), made[2]
    taken = replace(taken, why="preempted", ended_at=9.0)
    known = {each.instance.id: each for each in (stays, goes, taken)}
    assert RentedNow(CapacityState(instances=known)).given_back() == {"n1"}
    assert RentedNow().given_back() == frozenset()


def test_a_node_is_rented_also_after_its_instance_is_gone() -> None:
    known = {"1": RentedInstance(instance(1), 1.0, 0.0, 0.0)}
    state = CapacityState(instances=known, ended_nodes=("gone",))
    assert RentedNow(state).node_names() == {"n1", "gone"}
    assert RentedNow().node_names() == frozenset()


def test_what_the_provider_charges_is_told_for_each_gpu() -> None:
    assert RentedNow().prices() == ()
    found = RentedNow(CapacityState(prices={B: 8.0, A: 12.0})).prices()
    assert found == (
        PoolPrice(A.zone, A.machine, A.gpu, A.spot, 12.0 / A.gpus),
        PoolPrice(B.zone, B.machine, B.gpu, B.spot, 8.0 / B.gpus),
    )
