"""The agent's decisions: what it becomes and does after each event.

An agent follows the generation record in the store and its workers' statuses. It never starts a
generation that is not recorded in the store. It keeps workers that make progress, even if the
store or the leader is silent. And it refuses messages with a lower fence than the highest it has
seen.

``decide`` first updates what the agent knows (``_learn``), then applies rules until none fires,
and reports to the leader last.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import assert_never

from agents.core.model import (
    AbortGang,
    AbortReceived,
    Command,
    DeleteJobSnapshots,
    DeviceFailed,
    Event,
    Exit,
    FreeMemoryMeasured,
    Gang,
    GangExited,
    GangReported,
    GenerationRead,
    GenerationUnreadable,
    JobEnded,
    JoinGeneration,
    KillGang,
    LeaseEnded,
    Note,
    NoticeGiven,
    NoticeWithdrawn,
    Options,
    Register,
    Registered,
    ReleaseReceived,
    ReleaseSnapshots,
    SelfTested,
    SendReport,
    SendStop,
    Shortage,
    SnapshotsChanged,
    State,
    StopRequested,
    StoreFailed,
    StoreOrder,
    StoreSetBack,
    Ticked,
    TroubleChanged,
    UnfitChanged,
    UploadDone,
)
from agents.protocol.records import (
    SEAL_SLACK,
    Fence,
    GenerationRecord,
    NodeMeasurements,
    NodeState,
    Order,
    Report,
)

AgentDecision = tuple[State, tuple[Command, ...]]
RULES_MAX = 16
SERVICE_STOP_PREFIX = "end-"
"""Prefix of the ids of notices that come from a stop of the agent's service."""
PARK_STEPS = 3
"""Workers are parked only after the time of this many steps without progress."""
SEAL_S_MAX = 600.0
"""The longest time that workers get to seal their state after a loss."""


def decide(state: State, event: Event) -> AgentDecision:
    """Return the agent's next state, and the commands to carry out in this order."""
    resumed_at = event.at if event.at > state.now + state.options.nap_s else state.resumed_at
    state = replace(state, now=max(state.now, event.at), resumed_at=resumed_at)
    state, first = _learn(state, event)
    commands = list(first)
    for _ in range(RULES_MAX):
        outcome = _apply_first_rule(state)
        if outcome is None:
            state, report = _report(state)
            return state, (*commands, *report)
        state = outcome[0]
        commands += outcome[1]
    raise AssertionError(f"the rules did not converge after {RULES_MAX} steps: {state}")


# ---- learning from an event -------------------------------------------------------------------


def _learn(state: State, event: Event) -> AgentDecision:
    match event:
        case SelfTested():
            return _learn_self_test(state, event)
        case DeviceFailed():
            return _learn_device_failure(state, event.fault)
        case GenerationRead():
            state = _learn_record(replace(state, store_silent_since=None), event.record)
            return _forget_old_uploads(state, event), ()
        case StoreSetBack():
            heard = Fence(event.term, state.heard.generation)
            text = f"the store was set back: its leader's term {event.term} is below"
            return replace(state, heard=heard), (Note(f"{text} {state.heard.term}"),)
        case GenerationUnreadable():
            return replace(state, store_silent_since=None), ()
        case AbortReceived():
            return _learn_abort(state, event), ()
        case GangReported():
            return _learn_gang_status(state, event), ()
        case GangExited():
            return _learn_gang_exit(state, event)
        case SnapshotsChanged():
            is_ours = event.job in {None, state.job}
            return replace(state, sealed=event.sealed) if is_ours else state, ()
        case UploadDone():
            is_ours = event.job == state.job and event.uploaded not in state.uploaded
            uploaded = (*state.uploaded, event.uploaded) if is_ours else state.uploaded
            return replace(state, uploaded=uploaded), ()
        case TroubleChanged():
            is_ours = event.job == state.job
            return replace(state, trouble=event.trouble) if is_ours else state, ()
        case FreeMemoryMeasured():
            return _learn_free_memory(state, event), ()
        case UnfitChanged():
            return replace(state, unfit=event.why, unfit_for=event.job), ()
        case ReleaseReceived():
            # Only by order of the present leader, and for the present job.
            if event.term < state.heard.term or event.job != state.job:
                return state, ()
            running = 0 if state.gang is None else state.gang.generation
            return state, (ReleaseSnapshots(event.job, event.point, running),)
        case JobEnded():
            is_in_use = state.gang is not None and state.job == event.job
            return state, () if is_in_use else (DeleteJobSnapshots(event.job),)
        case LeaseEnded():
            return replace(state, is_registered=False), (Register(state.node),)
        case Registered():
            is_current = event.node == state.node
            return replace(state, is_registered=is_current, store_silent_since=None), ()
        case StoreFailed():
            since = state.now if state.store_silent_since is None else state.store_silent_since
            return replace(state, store_silent_since=since), ()
        case NoticeGiven():
            return _learn_notice(state, event)
        case NoticeWithdrawn():
            return _learn_withdrawal(state, event)
        case StopRequested():
            idle_since = state.idle_since if state.gang is not None else event.at
            leaving = replace(state, is_leaving=True, idle_since=idle_since)
            if state.notices:
                return leaving, ()  # One departure is one notice.
            id_ = f"{SERVICE_STOP_PREFIX}{state.node.id}-{event.at * 1e3:.0f}"
            return _learn_notice(leaving, NoticeGiven(event.at, id_))
        case Ticked():
            return state, ()
        case _:
            assert_never(event)


def _learn_self_test(state: State, event: SelfTested) -> AgentDecision:
    if event.why_not:
        failed = replace(state, is_healthy=False, why_not=event.why_not)
        return failed, (Note(f"not ready: {event.why_not}"),)
    node = state.node
    if node.state == "joining":
        node = replace(node, state="ready")
    passed = replace(state, node=node, is_healthy=True, why_not="", fault="")
    return passed, (Register(node),)


def _learn_device_failure(state: State, fault: str) -> AgentDecision:
    """Run nothing here until a self-test passes; a draining node stays draining."""
    node = state.node
    if node.state == "ready":
        node = replace(node, state="joining")
    broken = replace(state, node=node, is_healthy=False, fault=fault)
    return broken, (Register(node), Note(f"a device failed: {fault}"))


def _learn_record(state: State, record: GenerationRecord | None) -> State:
    if record is not None and record.job == state.job and record.number < state.heard.generation:
        # The read is late, or the store was set back: then sailord asks this node what it knows.
        return state
    state = replace(state, has_read_store=True)
    if record is None:
        return replace(state, record=None)
    fence = Fence(record.term, record.number)
    if state.job != record.job:
        # Generations are counted per job, and a node serves the next job only when it has left the
        # last.
        heard = Fence(state.heard.term, 0) if state.job is not None else state.heard
        left = 0 if state.job is not None else state.left
        sealed, uploaded = ((), ()) if state.job is not None else (state.sealed, state.uploaded)
        state = replace(
            state,
            job=record.job,
            heard=heard,
            left=left,
            sealed=sealed,
            uploaded=uploaded,
            trouble="",
            shortage=None,
        )
    heard = max(state.heard, fence)
    return replace(state, record=record, heard=heard)


def _forget_old_uploads(state: State, event: GenerationRead) -> State:
    """Forget uploads that are older than the committed checkpoint."""
    durable, record = event.durable, event.record
    if durable is None or record is None or record.job != state.job:
        return state
    counts = tuple(each for each in state.uploaded if each.point.step >= durable.step)
    return state if counts == state.uploaded else replace(state, uploaded=counts)


def _learn_free_memory(state: State, event: FreeMemoryMeasured) -> State:
    """End a shortage when there is room again, but not before ``short_s``."""
    shortage = state.shortage
    if shortage is None or event.free_bytes < shortage.needed_bytes:
        return state
    is_time = state.now >= shortage.since + state.options.short_s
    return replace(state, shortage=None) if is_time else state


def _learn_abort(state: State, event: AbortReceived) -> State:
    fence, gang = event.fence, state.gang
    if fence.term < state.heard.term:
        return state  # From a deposed leader.
    state = replace(state, heard=Fence(fence.term, state.heard.generation))
    if gang is None or event.job != state.job or gang.generation > fence.generation:
        return state  # It is about another job, or about earlier generations.
    return replace(state, gang=_mark_failed(gang, "aborted by the leader"))


def _learn_gang_status(state: State, event: GangReported) -> State:
    gang = state.gang
    if gang is None or event.generation != gang.generation:
        return state
    if event.taking == "idle":
        left = _mark_failed(gang, "the workers left the generation")
        return replace(state, gang=replace(left, is_free=True, sealing=None))
    since = gang.sealing_since
    if event.sealing is not None and since is None:
        since = state.now
    gang = replace(gang, sealing=event.sealing, sealing_since=since)
    state = replace(state, gang=gang)
    if gang.taking == "failed":
        return state  # A generation that failed here does not recover, but its workers may seal.
    if event.room_needed:
        state = replace(state, shortage=Shortage(event.failure, event.room_needed, state.now))
    advanced_at = state.now if event.step > gang.step else gang.advanced_at
    return replace(
        state,
        gang=replace(
            gang,
            taking=event.taking,
            step=max(gang.step, event.step),
            advanced_at=advanced_at,
            broken_peers=event.broken_peers,
            contradicted=event.contradicted,
            agreed_at=event.agreed_at,
            hang=event.hang,
            failure=event.failure,
            is_bug=event.is_bug,
            measured=event.measured,
        ),
    )


def _learn_gang_exit(state: State, event: GangExited) -> AgentDecision:
    gang = state.gang
    if gang is None or event.generation != gang.generation:
        return state, ()
    failed = _mark_failed(gang, event.failure or "the workers exited", is_bug=event.is_bug)
    gone = replace(failed, is_free=True, abort_sent_at=state.now, sealing=None)
    return replace(state, gang=gone), ()


def _mark_failed(gang: Gang, failure: str, *, is_bug: bool = False) -> Gang:
    """Mark the gang as failed; the first reason counts."""
    if gang.taking == "failed":
        return gang
    return replace(gang, taking="failed", failure=failure, is_bug=is_bug)


def _learn_notice(state: State, event: NoticeGiven) -> AgentDecision:
    if event.id in state.notices:
        known, announced = state.node.leaves_at, event.leaves_at
        if announced is None or (known is not None and known <= announced):
            return state, ()
        node = replace(state.node, leaves_at=announced)  # It leaves earlier than was announced.
        return replace(state, node=node), (Register(node),)
    node = replace(state.node, state="draining", leaves_at=event.leaves_at)
    order = Order(event.id, "preempt", node.id, event.leaves_at, "the machine announced its end")
    noticed = replace(state, node=node, notices=state.notices | {event.id})
    return noticed, (Register(node), StoreOrder(order))


def _learn_withdrawal(state: State, event: NoticeWithdrawn) -> AgentDecision:
    if event.id not in state.notices or state.is_leaving:
        return state, ()
    left = state.notices - {event.id}
    if left:
        return replace(state, notices=left), ()  # Another notice remains.
    stays: NodeState = "ready" if state.is_healthy else "joining"
    node = replace(state.node, state=stays, leaves_at=None)
    id_, reason = f"{event.id}-withdrawn", "notice withdrawn"
    order = Order(id_, "withdraw", node.id, None, reason, of_notice=True)
    return replace(state, node=node, notices=left), (Register(node), StoreOrder(order))


# ---- rules ------------------------------------------------------------------------------------


def _apply_first_rule(state: State) -> AgentDecision | None:
    """Apply the first rule that fires; ``None``: no rule fires.

    Without workers: join a generation, else exit if asked to. With workers that the store no longer
    wants: end them. Else, in this order: give up workers that are cut off, then those on a broken
    device, then abort failed ones, and last pass on the step at which to stop.
    """
    gang = state.gang
    if gang is None:
        return _join(state) or _exit(state)
    if state.has_read_store and not _is_wanted(state, gang):
        return _end_gang(state, gang)
    for rule in (_give_up_cut_off, _give_up_on_broken_device, _abort_failed, _send_stop):
        decision = rule(state, gang)
        if decision is not None:
            return decision
    return None


# ---- rules without workers --------------------------------------------------------------------


def _join(state: State) -> AgentDecision | None:
    """Join the open generation if this node is a member."""
    record = state.record
    if record is None or not _may_join(state, record):
        return None
    gang = Gang(record.number, "fetching", record.restore.point.step, advanced_at=state.now)
    note = Note(f"joining generation {record.number}: {record.reason}")
    return replace(state, gang=gang), (JoinGeneration(record), note)


def _may_join(state: State, record: GenerationRecord) -> bool:
    """Return whether it is open, has this node as a member, and is neither left nor outdated."""
    if record.state != "open" or state.node.id not in record.members:
        return False
    if state.store_silent_since is not None:
        return False
    return record.number > state.left and record.number >= state.heard.generation


def _exit(state: State) -> AgentDecision | None:
    """Exit, if asked to, once no worker is left and no other node needs this node's snapshots."""
    if not state.is_leaving or _is_needed_by_others(state):
        return None
    return replace(state, is_leaving=False), (Exit(),)


def _is_needed_by_others(state: State) -> bool:
    """Return whether the next generation may restore from snapshots here; only for ``needed_s``."""
    record = state.record
    if record is None or record.state == "closed" or not state.sealed:
        return False
    if state.now >= state.idle_since + state.options.needed_s:
        return False
    if state.node.id in record.members or record.state == "stopping":
        return True  # The generation that follows is not known yet.
    restore = record.restore
    return restore.source == "memory" and any(s.point == restore.point for s in state.sealed)


# ---- rules for workers that the store wants ---------------------------------------------------


def _give_up_cut_off(state: State, gang: Gang) -> AgentDecision | None:
    """Give up workers without progress while the store is silent: a new generation may be open."""
    if state.store_silent_since is None or gang.taking == "failed":
        return None
    still_since = max(state.store_silent_since, gang.advanced_at, state.resumed_at)
    step_s = 0.0 if state.record is None else state.record.step_s
    if state.now < still_since + max(state.options.park_s, PARK_STEPS * step_s):
        return None
    failed = _mark_failed(gang, "cut off from the store, and no step was done")
    return replace(state, gang=failed), ()


def _give_up_on_broken_device(state: State, gang: Gang) -> AgentDecision | None:
    """Give up workers on a broken device."""
    if not state.fault or gang.taking == "failed":
        return None
    return replace(state, gang=_mark_failed(gang, state.fault)), ()


def _abort_failed(state: State, gang: Gang) -> AgentDecision | None:
    """Abort workers that have failed; the leader decides what follows."""
    is_new = gang.taking == "failed" and gang.abort_sent_at is None
    return _end_gang(state, gang) if is_new else None


def _send_stop(state: State, gang: Gang) -> AgentDecision | None:
    """Tell the workers once at which step to stop."""
    record = state.record
    if record is None or record.state != "stopping" or record.stop_at is None:
        return None
    if gang.stop_at is not None or gang.taking in {"stopped", "failed"}:
        return None
    stopping = replace(gang, stop_at=record.stop_at)
    return replace(state, gang=stopping), (SendStop(gang.generation, record.stop_at),)


# ---- ending workers, and reports --------------------------------------------------------------


def _is_wanted(state: State, gang: Gang) -> bool:
    """Return whether the gang's generation is open or stopping, with this node as a member."""
    record = state.record
    if record is None or record.state == "closed":
        return False
    return record.number == gang.generation and state.node.id in record.members


def _end_gang(state: State, gang: Gang) -> AgentDecision | None:
    """Abort the workers, then kill them. Their devices are free once they say so or have ended."""
    if gang.is_free:
        return replace(state, gang=None, left=gang.generation, idle_since=state.now), ()
    if gang.abort_sent_at is None:
        aborted = replace(gang, abort_sent_at=state.now)
        return replace(state, gang=aborted), (AbortGang(gang.generation),)
    if gang.kill_sent_at is None:
        is_due = state.now >= leave_by(state.options, gang, gang.abort_sent_at)
    else:
        is_due = state.now >= gang.kill_sent_at + state.options.kill_s
    if not is_due:
        return None
    killed = replace(gang, kill_sent_at=state.now)
    return replace(state, gang=killed), (KillGang(gang.generation),)


def leave_by(options: Options, gang: Gang, abort_sent_at: float) -> float:
    """Return when aborted workers are killed, with which anything they still seal is lost.

    Workers that announced a seal get ``SEAL_SLACK`` times the announced time, from their first
    announcement on, and at most ``SEAL_S_MAX``: workers that hang cannot put their end off.
    """
    by = abort_sent_at + options.abort_s
    if gang.sealing is None or gang.sealing_since is None:
        return by
    return max(by, gang.sealing_since + min(SEAL_SLACK * gang.sealing.ready_in_s, SEAL_S_MAX))


def _is_left_behind(state: State) -> bool:
    """Return whether the job goes on without this node, so that nothing would end its troubles."""
    record = state.record
    return state.gang is None and record is not None and record.number > state.left


def _report(state: State) -> AgentDecision:
    """Report changes to the leader at once, and otherwise every ``report_every_s``."""
    gang = state.gang or Gang(0, "idle")
    report = Report(
        node=state.node.id,
        number=state.reports,
        heard=state.heard,
        generation=gang.generation,
        taking=gang.taking,
        step=gang.step,
        sealed=state.sealed,
        broken_peers=gang.broken_peers,
        contradicted=gang.contradicted,
        agreed_at=gang.agreed_at,
        hang=gang.hang,
        failure=gang.failure,
        is_bug=gang.is_bug,
        job=state.job,
        uploaded=state.uploaded,
        trouble="" if _is_left_behind(state) else state.trouble,
        fault=state.fault,
        sealing=gang.sealing,
        unfit_for=state.unfit_for if state.unfit else None,
        unfit=state.unfit or ("" if state.shortage is None else state.shortage.why),
        **{each.name: getattr(gang.measured, each.name) for each in fields(NodeMeasurements)},
    )
    if report == state.last_report and state.now < state.reported_at + state.options.report_every_s:
        return state, ()
    report = replace(report, number=state.reports + 1)
    reported = replace(state, reports=report.number, last_report=report, reported_at=state.now)
    return reported, (SendReport(report),)
