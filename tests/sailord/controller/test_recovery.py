"""When sailord asks nodes for what the store does not know."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agents.protocol.records import Fence
from agents.protocol.store_keys import Keys
from agents.rpc.client import CallFailed
from sailord.cluster_records import StoredRecords
from sailord.controller.recovery import Recovery
from tests.sailord.core.states import TERM, A, B, G, generation, job, node, report, state

AHEAD = Fence(TERM, 9)


class Agents:
    """Notes who is asked for its newest generation."""

    def __init__(self):
        self.asked = []

    async def known_generation(self, node):
        self.asked.append(node.address)
        raise CallFailed("it does not answer")


async def nothing(_):
    return None


def asked(*nodes, jobs=None, records=(G,)):
    """Return the addresses that are asked."""
    gateway, agents = (
        SimpleNamespace(keys=Keys("test"), store=SimpleNamespace(get=nothing)),
        Agents(),
    )
    stored = StoredRecords(
        1,
        nodes=(),
        jobs=(job(),) if jobs is None else jobs,
        generations=records,
        durables=(),
        orders=(),
    )
    recovery = Recovery(gateway, agents)
    assert not asyncio.run(recovery.recover(stored, state(None, *nodes)))
    return agents.asked, recovery.unknown


def test_nodes_that_agree_with_the_store_are_not_asked():
    assert asked(node(A), node(B)) == ([], {})


def test_nodes_that_run_a_later_generation_than_the_store_holds_are_asked():
    ahead = [node(each, report(each, of=9)) for each in (A, B)]
    assert asked(*ahead)[0] == ["a:1", "b:1"]
    assert asked(*ahead, records=())[0] == ["a:1", "b:1"]


def test_a_node_that_lies_is_not_asked_while_another_runs_the_stored_generation():
    liar = node(B, report(B, heard=AHEAD))
    assert asked(node(A), liar)[0] == []
    broken = node(A, report(A, "failed"))
    liar = node(B, report(B, "idle", heard=AHEAD))
    assert asked(broken, liar)[0] == ["b:1"]


@pytest.mark.parametrize("of", [G.number, 9])
def test_a_job_without_a_record_is_named(of):
    found, unknown = asked(node(A, report(A, of=of)), node(B), jobs=(), records=())
    assert found == []
    assert [*unknown] == [Keys("test").state(job().id)]


def test_nodes_are_compared_at_intervals_and_at_once_when_a_job_is_new():
    recovery = Recovery(SimpleNamespace(keys=Keys("test"), store=None), Agents())
    records, known = (
        StoredRecords(1, nodes=(), jobs=(job(),), generations=(), durables=(), orders=()),
        state(None),
    )
    assert recovery.is_due(records, known, 10.0)
    assert not recovery.is_due(records, known, 10.9)
    assert recovery.is_due(records, replace(known, jobs={}), 10.9)
    assert not recovery.is_due(records, known, 11.8)
    assert recovery.is_due(records, known, 12.0)


def test_an_ended_job_is_not_recovered():
    ended = replace(job(), state="done")
    ahead = node(A, report(A, of=9))
    assert asked(ahead, jobs=(ended,), records=(generation(),))[0] == []
