"""The record of the next generation."""

from __future__ import annotations

from agents.protocol.records import GenerationRecord, Restore
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active, State
from sailord.core.queries.restore_point import lineage_of
from sailord.core.queries.snapshot_intervals import intervals_now
from sailord.core.queries.timeouts import step_of, wait_s


def next_record(
    state: State, active: Active, proposal: Proposal, restore: Restore, reason: str
) -> GenerationRecord:
    """Return the record of the generation that carries out the proposal."""
    last = active.generation
    often = intervals_now(state, active, proposal)
    step_s = step_of(active, proposal)
    assert state.term is not None, "only the leader opens a generation"
    return GenerationRecord(
        job=active.job,
        number=1 if last is None else last.number + 1,
        state="open",
        plan=proposal.plan,
        members=tuple(sorted(proposal.members)),
        restore=restore,
        term=state.term,
        reason=reason,
        lineage=() if last is None else lineage_of(last),
        memory_every=often.memory_every,
        persist_every=often.persist_every,
        usd_per_hour=proposal.usd_per_hour,
        busy=proposal.busy,
        peaks=proposal.peaks,
        worths=proposal.worths,
        step_s=step_s,
        wait_s=wait_s(state.options, proposal, step_s),
    )
