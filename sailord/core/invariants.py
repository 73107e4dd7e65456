"""Invariants of every decision; a breach is a bug in the controller and ends the process."""

from __future__ import annotations

from collections.abc import Iterable

from agents.protocol.records import LIVE
from sailord.core.model.commands import AbortGeneration, Command, WriteGeneration, WriteJob
from sailord.core.model.phases import (
    Closing,
    Held,
    Opening,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from sailord.core.model.state import State
from sailord.core.queries.generation_record import next_number


def check(before: State, after: State, commands: Iterable[Command]) -> None:
    """Raise if a decision broke an invariant of the protocol."""
    assert after.now >= before.now, "time went backwards"
    commands = tuple(commands)
    writes = [command for command in commands if isinstance(command, WriteGeneration)]
    assert len({each.record.job for each in writes}) == len(writes), f"a job's records: {writes}"
    if after.term is None:
        assert after.active is None, "a sailord that is not the leader runs a job"
        assert not writes, "a sailord that is not the leader writes"
        return
    if after.term == before.term:
        _check_jobs(before, after, commands)
    for write in writes:
        _check_write(after, write)
    for command in commands:
        if isinstance(command, AbortGeneration):
            _check_abort(after, command)
    _check_phase(after)


def _check_jobs(before: State, after: State, commands: Iterable[Command]) -> None:
    """Every change of a job's record is written to the store."""
    if after.jobs is before.jobs:
        return
    written = {each.job.id: each.job for each in commands if isinstance(each, WriteJob)}
    for id_, job in after.jobs.items():
        stored = written.get(
            id_, before.jobs.get(id_, job)
        )  # A job that is new was just read from the store.
        assert job == stored, f"the record of {id_} changed and was not written"


def _check_write(state: State, write: WriteGeneration) -> None:
    record, last = write.record, write.replaces
    assert record.term == state.term, "a record is written under another's term"
    assert record.members == tuple(sorted(set(record.members))), "members are a sorted set"
    if last is None or record.number != last.number:
        assert record.number == next_number(state, record.job, last), "a number was skipped"
        assert record.state == "open", "a generation begins open"
        assert record.members, "a generation without members"
        known = [state.nodes[id_] for id_ in record.members if id_ in state.nodes]
        wrong = [node.record.name for node in known if node.exclusion.wrong_bits]
        assert not wrong, f"a generation uses {wrong}, whose bits were contradicted"
        durable = write.lowers or state.durables.get(record.job)
        if durable is not None:
            assert record.restore.point.step >= durable.point.step, "durable steps are given up"
        return
    states = ("open", "stopping", "closed")
    assert states.index(record.state) > states.index(last.state), "a generation's state went back"
    same = (record.plan, record.members, record.restore) == (last.plan, last.members, last.restore)
    assert same, "what a generation is was changed after it was opened"


def _check_abort(state: State, command: AbortGeneration) -> None:
    active = state.active
    assert active is not None, "a generation is aborted and no job is active"
    generation = active.generation
    assert generation is not None, "a generation is aborted and there is none"
    # After a hold, or a resume that came with it.
    is_over = command.generation < generation.number or isinstance(active.phase, Held | Waiting)
    assert is_over, "the present generation is aborted"


def _check_phase(state: State) -> None:
    active = state.active
    if active is None:
        return
    assert state.job.state in LIVE, "the active job is not marked as such"
    generation = active.generation
    match active.phase:
        case Starting() | Running():
            assert generation is not None, "something runs without a generation"
            assert generation.state != "closed", "a closed generation runs"
        case Stopping():
            assert generation is not None, "something stops without a generation"
        case Opening():
            record = active.phase.record
            is_written = generation is not None and record.number == generation.number
            is_next = record.number == next_number(state, active.job, generation)
            assert is_written or is_next, "a generation is opened out of turn"
        case Closing() if generation is not None:
            assert generation.job == active.job, "another job's generation is closed"
        case _:
            pass
