"""Makes the record of the next generation: its number, members and plan, and where it begins."""

from __future__ import annotations

from agents.protocol.records import Durable, GenerationRecord, JobId, Restore
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active, State
from sailord.core.queries.restore_choice import fallback_now
from sailord.core.queries.restore_point import lineage_of
from sailord.core.queries.snapshot_intervals import intervals_now
from sailord.core.queries.timeouts import plain_s, step_of, wait_s


def is_first(record: GenerationRecord) -> bool:
    """Return whether no generation of the job came before this one, in this store."""
    return not record.lineage


def next_number(state: State, job: JobId, last: GenerationRecord | None) -> int:
    """Return the number of the generation after ``last``, or of a job's first one.

    A first one follows the generations that another store counted and that checkpoints are of, so
    that the newest checkpoint is always that of the highest generation.
    """
    if last is not None:
        return last.number + 1
    durable = state.durables.get(job)
    known = 0 if durable is None else durable.point.generation
    return max(state.jobs[job].generations_before, known) + 1


def next_record(
    state: State,
    active: Active,
    proposal: Proposal,
    restore: Restore,
    reason: str,
    lowers: Durable | None = None,
) -> GenerationRecord:
    """Return the record of the generation that carries out the proposal.

    ``restore`` and ``lowers`` are those of ``restore_now``.
    """
    last = active.generation
    often = intervals_now(state, active, proposal)
    step_s = step_of(active, proposal)
    assert state.term is not None, "only the leader opens a generation"
    return GenerationRecord(
        job=active.job,
        number=next_number(state, active.job, last),
        state="open",
        plan=proposal.plan,
        members=tuple(sorted(proposal.members)),
        restore=restore,
        term=state.term,
        reason=reason,
        lineage=() if last is None else lineage_of(last),
        fallback=fallback_now(state, active, restore, lowers),
        memory_every=often.memory_every,
        persist_every=often.persist_every,
        usd_per_hour=proposal.usd_per_hour,
        busy=proposal.busy,
        peaks=proposal.peaks,
        worths=proposal.worths,
        step_s=step_s,
        predicted_s=plain_s(proposal),
        wait_s=wait_s(state.options, proposal, step_s),
        next_move_s=proposal.next_move_s,
    )
