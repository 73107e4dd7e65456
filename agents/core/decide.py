"""What an agent does: the one place where it decides.

It follows the store's record of the generation and its workers' word. It never moves on its own
to what nobody recorded, keeps workers whose steps go on whatever else is silent, and refuses
whoever speaks with a lower fence than one it heard before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from agents.core.model import (
    UNMEASURED,
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
    JobEnded,
    JoinGeneration,
    KillGang,
    LeaseEnded,
    Note,
    NoticeGiven,
    NoticeWithdrawn,
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
    StoreIntent,
    Ticked,
    TroubleChanged,
    UploadDone,
)
from agents.protocol.records import Fence, GenerationRecord, Intent, NodeState, Report

Decision = tuple[State, tuple[Command, ...]]
RULES_MAX = 16
PARK_STEPS = 3
"""Before workers are parked, at least so many steps might have been done."""


def decide(state: State, event: Event) -> Decision:
    """Say what the agent becomes and does, now that ``event`` has happened."""
    woken_at = event.at if event.at > state.now + state.options.nap_s else state.woken_at
    state = replace(state, now=max(state.now, event.at), woken_at=woken_at)
    state, first = _learn(state, event)
    commands = list(first)
    for _ in range(RULES_MAX):
        outcome = _next_rule(state)
        if outcome is None:
            state, report = _report(state)
            return state, (*commands, *report)
        state = outcome[0]
        commands += outcome[1]
    raise AssertionError(f"the rules come to no rest: {state}")


# ---- what is known ----------------------------------------------------------------------------


def _learn(state: State, event: Event) -> Decision:
    match event:
        case SelfTested():
            return _tested(state, event)
        case DeviceFailed():
            return _broken(state, event.fault)
        case GenerationRead():
            state = _read(replace(state, silent_since=None), event.record)
            return _drop_votes(state, event), ()
        case AbortReceived():
            return _hear_abort(state, event), ()
        case GangReported():
            return _hear_gang(state, event), ()
        case GangExited():
            return _gang_gone(state, event)
        case SnapshotsChanged():
            is_ours = event.job in {None, state.job}
            return replace(state, sealed=event.sealed) if is_ours else state, ()
        case UploadDone():
            return _uploaded(state, event), ()
        case TroubleChanged():
            is_ours = event.job == state.job
            return replace(state, trouble=event.trouble) if is_ours else state, ()
        case FreeMemoryMeasured():
            return _see_room(state, event), ()
        case ReleaseReceived():
            return state, _release(state, event)
        case JobEnded():
            is_held = state.gang is not None and state.job == event.job
            return state, () if is_held else (DeleteJobSnapshots(event.job),)
        case LeaseEnded():
            return replace(state, is_registered=False), (Register(state.node),)
        case Registered():
            is_current = event.node == state.node
            return replace(state, is_registered=is_current, silent_since=None), ()
        case StoreFailed():
            since = state.now if state.silent_since is None else state.silent_since
            return replace(state, silent_since=since), ()
        case NoticeGiven():
            return _notice(state, event)
        case NoticeWithdrawn():
            return _withdraw(state, event)
        case StopRequested():
            leaving = replace(state, is_leaving=True)
            if state.notices:
                return leaving, ()  # One going, one notice.
            return _notice(leaving, NoticeGiven(event.at, f"end-{state.node.id}"))
        case Ticked():
            return state, ()
        case _:
            assert_never(event)


def _tested(state: State, event: SelfTested) -> Decision:
    if event.why_not:
        return replace(state, is_sound=False), (Note(f"not ready: {event.why_not}"),)
    node = state.node
    if node.state == "joining":
        node = replace(node, state="ready")
    return replace(state, node=node, is_sound=True, fault=""), (Register(node),)


def _broken(state: State, fault: str) -> Decision:
    """Nothing runs here until the devices are found sound again; a node that leaves still does."""
    node = state.node
    if node.state == "ready":
        node = replace(node, state="joining")
    broken = replace(state, node=node, is_sound=False, fault=fault)
    return broken, (Register(node), Note(f"a device broke: {fault}"))


def _read(state: State, record: GenerationRecord | None) -> State:
    state = replace(state, has_read=True)
    if record is None:
        return replace(state, record=None)
    fence = Fence(record.term, record.number)
    known = state.record
    if state.job != record.job:
        # Each job counts its generations from one, and is only shown to who has left the last.
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
    if known is not None and known.job == record.job and record.number < known.number:
        return state  # A read that was overtaken by a newer one.
    heard = max(state.heard, fence)
    return replace(state, record=record, heard=heard)


def _drop_votes(state: State, event: GenerationRead) -> State:
    """Of what is older than the committed checkpoint nobody wants to know any more."""
    durable, record = event.durable, event.record
    if durable is None or record is None or record.job != state.job:
        return state
    counts = tuple(each for each in state.uploaded if each.point.step >= durable.step)
    return state if counts == state.uploaded else replace(state, uploaded=counts)


def _uploaded(state: State, event: UploadDone) -> State:
    if event.job != state.job or event.uploaded in state.uploaded:
        return state
    return replace(state, uploaded=(*state.uploaded, event.uploaded))


def _see_room(state: State, event: FreeMemoryMeasured) -> State:
    """Who was too small may have grown, or got rid of something."""
    shortage = state.shortage
    if shortage is None or event.free_bytes < shortage.needed_bytes:
        return state
    is_time = state.now >= shortage.since + state.options.short_s
    return replace(state, shortage=None) if is_time else state


def _release(state: State, event: ReleaseReceived) -> tuple[Command, ...]:
    """Only who leads may say so, and only of the job at hand."""
    if event.term < state.heard.term or event.job != state.job:
        return ()
    running = 0 if state.gang is None else state.gang.generation
    return (ReleaseSnapshots(event.job, event.point, running),)


def _hear_abort(state: State, event: AbortReceived) -> State:
    fence, gang = event.fence, state.gang
    if fence.term < state.heard.term:
        return state  # Somebody speaks who leads no more.
    state = replace(state, heard=Fence(fence.term, state.heard.generation))
    if gang is None or event.job != state.job or gang.generation > fence.generation:
        return state  # Late words about another job say nothing of the workers at hand.
    return replace(state, gang=_failed(gang, "it was told to abort"))


def _hear_gang(state: State, event: GangReported) -> State:
    gang = state.gang
    if gang is None or event.generation != gang.generation:
        return state
    if event.taking == "idle":
        return replace(state, gang=replace(_failed(gang, "the workers left it"), is_free=True))
    if gang.taking == "failed":
        return state  # A generation that failed here does not come back to life.
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
            failure=event.failure,
            is_bug=event.is_bug,
            measured=event.measured,
        ),
    )


def _gang_gone(state: State, event: GangExited) -> Decision:
    gang = state.gang
    if gang is None or event.generation != gang.generation:
        return state, ()
    failed = _failed(gang, event.failure or "the workers exited", is_bug=event.is_bug)
    gone = replace(failed, is_free=True, abort_sent_at=state.now)
    return replace(state, gang=gone), ()


def _failed(gang: Gang, failure: str, *, is_bug: bool = False) -> Gang:
    """It cannot go on; the first reason is the one that counts."""
    if gang.taking == "failed":
        return gang
    return replace(gang, taking="failed", failure=failure, is_bug=is_bug)


def _notice(state: State, event: NoticeGiven) -> Decision:
    if event.id in state.notices:
        known, told = state.node.leaves_at, event.leaves_at
        if told is None or (known is not None and known <= told):
            return state, ()
        node = replace(state.node, leaves_at=told)  # Sooner than was said first.
        return replace(state, node=node), (Register(node),)
    node = replace(state.node, state="draining", leaves_at=event.leaves_at)
    intent = Intent(event.id, "preempt", node.id, event.leaves_at, "the machine said so")
    noticed = replace(state, node=node, notices=state.notices | {event.id})
    return noticed, (Register(node), StoreIntent(intent))


def _withdraw(state: State, event: NoticeWithdrawn) -> Decision:
    if event.id not in state.notices or state.is_leaving:
        return state, ()
    left = state.notices - {event.id}
    if left:
        return replace(state, notices=left), ()  # Another word says that it goes.
    stays: NodeState = "ready" if state.is_sound else "joining"
    node = replace(state.node, state=stays, leaves_at=None)
    intent = Intent(f"{event.id}-withdrawn", "withdraw", node.id, None, "the machine stays")
    return replace(state, node=node, notices=left), (Register(node), StoreIntent(intent))


# ---- what follows from it ---------------------------------------------------------------------


def _next_rule(state: State) -> Decision | None:
    """The first rule that has something to do says what; ``None``: all is as it should be."""
    gang = state.gang
    if gang is None:
        return _join(state) or _end(state)
    if state.has_read and not _is_wanted(state, gang):
        return _end_gang(state, gang)
    for rule in (_park_cut_off, _give_up_unsound, _abort_failed, _pass_on_stop):
        move = rule(state, gang)
        if move is not None:
            return move
    return None


# ---- rules where no workers run -----------------------------------------------------------------


def _join(state: State) -> Decision | None:
    """Take part in the generation of which this node is a member."""
    record = state.record
    if record is None or not _may_join(state, record):
        return None
    gang = Gang(record.number, "fetching", record.restore.point.step, advanced_at=state.now)
    note = Note(f"joining generation {record.number}: {record.reason}")
    return replace(state, gang=gang), (JoinGeneration(record), note)


def _may_join(state: State, record: GenerationRecord) -> bool:
    """It is open, ours, and neither left before nor older than what was heard of."""
    if record.state != "open" or state.node.id not in record.members:
        return False
    if state.silent_since is not None:
        return False
    return record.number > state.left and record.number >= state.heard.generation


def _end(state: State) -> Decision | None:
    """Whoever asked the agent to end waited for its workers, and for who needs its memory."""
    if not state.is_leaving or _is_needed(state):
        return None
    return replace(state, is_leaving=False), (Exit(),)


def _is_needed(state: State) -> bool:
    """The next generation begins from what stands here; its members fetch it, for a while."""
    record = state.record
    if record is None or record.state != "open" or record.restore.source != "memory":
        return False
    if state.now >= state.idle_since + state.options.needed_s:
        return False
    return any(sealed.point == record.restore.point for sealed in state.sealed)


# ---- rules for workers that the store wants ------------------------------------------------------


def _park_cut_off(state: State, gang: Gang) -> Decision | None:
    """Nobody can tell whether the generation is still the present one, and it stands still."""
    if state.silent_since is None or gang.taking == "failed":
        return None
    still_since = max(state.silent_since, gang.advanced_at, state.woken_at)
    step_s = 0.0 if state.record is None else state.record.step_s
    if state.now < still_since + max(state.options.park_s, PARK_STEPS * step_s):
        return None
    failed = _failed(gang, "cut off from the store, and no step was done")
    return replace(state, gang=failed), ()


def _give_up_unsound(state: State, gang: Gang) -> Decision | None:
    """Nothing is computed on a device that broke."""
    if not state.fault or gang.taking == "failed":
        return None
    return replace(state, gang=_failed(gang, state.fault)), ()


def _abort_failed(state: State, gang: Gang) -> Decision | None:
    """Workers that cannot go on are told to end; what follows waits for the leader's word."""
    is_new = gang.taking == "failed" and gang.abort_sent_at is None
    return _end_gang(state, gang) if is_new else None


def _pass_on_stop(state: State, gang: Gang) -> Decision | None:
    """Workers hear once at which step's end all are to park."""
    record = state.record
    if record is None or record.state != "stopping" or record.stop_at is None:
        return None
    if gang.stop_at is not None or gang.taking in {"stopped", "failed"}:
        return None
    told = replace(gang, stop_at=record.stop_at)
    return replace(state, gang=told), (SendStop(gang.generation, record.stop_at),)


# ---- ending workers, and telling of them ---------------------------------------------------------


def _is_wanted(state: State, gang: Gang) -> bool:
    """The store still names this node as a member of the gang's generation."""
    record = state.record
    if record is None or record.state == "closed":
        return False
    return record.number == gang.generation and state.node.id in record.members


def _end_gang(state: State, gang: Gang) -> Decision | None:
    """First by word, then by force. A device is free only when its process says so or is gone."""
    options = state.options
    if gang.is_free:
        return replace(state, gang=None, left=gang.generation, idle_since=state.now), ()
    if gang.abort_sent_at is None:
        aborted = replace(gang, abort_sent_at=state.now)
        return replace(state, gang=aborted), (AbortGang(gang.generation),)
    if gang.kill_sent_at is None:
        is_due = state.now >= gang.abort_sent_at + options.abort_s
    else:
        is_due = state.now >= gang.kill_sent_at + options.kill_s
    if not is_due:
        return None
    killed = replace(gang, kill_sent_at=state.now)
    return replace(state, gang=killed), (KillGang(gang.generation),)


def _report(state: State) -> Decision:
    """Tell the leader at once what changed, and now and then that all is as it was."""
    gang = state.gang
    measured = gang.measured if gang is not None else UNMEASURED
    report = Report(
        node=state.node.id,
        number=state.reports,
        heard=state.heard,
        generation=gang.generation if gang is not None else 0,
        taking=gang.taking if gang is not None else "idle",
        step=gang.step if gang is not None else 0,
        sealed=state.sealed,
        broken_peers=gang.broken_peers if gang is not None else (),
        failure=gang.failure if gang is not None else "",
        is_bug=gang.is_bug if gang is not None else False,
        job=state.job,
        loss=measured.loss,
        tokens_per_s=measured.tokens_per_s,
        stall_s=measured.stall_s,
        late_s=measured.late_s,
        settle_s=measured.settle_s,
        phases=measured.phases,
        busy=measured.busy,
        uploaded=state.uploaded,
        trouble=state.trouble,
        fault=state.fault,
        no_room="" if state.shortage is None else state.shortage.why,
    )
    if report == state.last_report and state.now < state.reported_at + state.options.report_every_s:
        return state, ()
    report = replace(report, number=state.reports + 1)
    told = replace(state, reports=report.number, last_report=report, reported_at=state.now)
    return told, (SendReport(report),)
