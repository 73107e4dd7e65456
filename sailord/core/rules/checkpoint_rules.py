"""Checkpoints: committing them, making a snapshot durable on request, and checking before restore.

Two-phase commit. Agents upload what their workers sealed and report it. Objects that cover every
piece of a point exactly once get a manifest; then one transaction makes it the newest checkpoint,
if the term is ours, the generation is the present one and the step is later than the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from agents.protocol.records import GenerationRecord, Order, Point, Restore, Uploaded
from sailord.core.model.commands import (
    CheckDurable,
    CollectGarbage,
    CommitCheckpoint,
    Note,
    Settled,
    SettleOrder,
    WriteManifest,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    CommitFailed,
    DurableChecked,
    ManifestWritten,
)
from sailord.core.model.phases import Closing, Opening, Running
from sailord.core.model.rule import PASS, WAIT, RuleAnswer, Step
from sailord.core.model.state import Active, Check, Commit, Securing, State
from sailord.core.queries.differences import last_right_step
from sailord.core.queries.restore_choice import in_memory
from sailord.core.queries.restore_point import complete_points

# ---- what the storage said ----------------------------------------------------------------------


def take_storage_outcome(
    state: State, event: ManifestWritten | CheckpointCommitted | CommitFailed | DurableChecked
) -> State:
    """Take in the outcome of a commit, or of a check of the newest checkpoint."""
    if isinstance(event, CheckpointCommitted):
        before = state.durables.get(event.job)
        if before is None or before.point.step < event.durable.point.step:
            state = replace(state, durables={**state.durables, event.job: event.durable})
    active = state.active
    if active is None or active.job != event.job:
        return state
    known = active.checkpointing
    commit, check = known.commit, known.check
    match event:
        case DurableChecked() if check is not None and (check.of, check.step_max) == (
            (event.of, event.step_max)
        ):
            if event.is_away:
                known = replace(known, check=None, retry_at=_retry_at(state), trouble=event.why)
            else:
                why_none = event.why if event.found is None else ""
                known = replace(known, check=replace(check, found=event.found, why_none=why_none))
        case ManifestWritten() if commit == Commit(event.durable.point):
            known = replace(known, commit=Commit(commit.point, event.durable))
        case CheckpointCommitted() if commit is not None and commit.durable == event.durable:
            known = replace(known, commit=None, trouble="")
        case CommitFailed() if commit is not None and commit.point == event.point:
            known = replace(
                known,
                commit=None,
                retry_at=_retry_at(state),
                trouble=event.why,
                failed_at=event.point,
            )
        case _:
            pass
    return replace(state, active=replace(active, checkpointing=known))


def change_checkpointing(state: State, active: Active, **facts: Any) -> State:
    """Return the state with other facts about the job's checkpoints."""
    known = replace(active.checkpointing, **facts)
    return replace(state, active=replace(active, checkpointing=known))


def _retry_at(state: State) -> float:
    return state.now + state.options.commit_pause_s


# ---- committing -------------------------------------------------------------------------------


def covering(
    uploads: Iterable[Uploaded], *, layers: int, atoms: int
) -> tuple[Uploaded, ...] | None:
    """Return uploads that together have every piece exactly once; ``None``: not complete yet.

    A restarted agent may have uploaded the same pieces again under another name.
    """
    chosen: list[Uploaded] = []
    held: set[tuple[int, int]] = set()
    for each in sorted(uploads, key=lambda upload: upload.uri):
        own = {(part.layer, piece) for part in each.holds for piece in range(part.first, part.end)}
        if own and not own & held:
            chosen.append(each)
            held |= own
    whole = {(layer, piece) for layer in range(layers) for piece in range(atoms)}
    return tuple(chosen) if held == whole else None


def await_commit(_: State, active: Active) -> RuleAnswer:
    """Wait while a checkpoint is being stored: the next generation may begin from it."""
    commit = active.checkpointing.commit
    return WAIT if commit is not None and commit.is_storing else PASS


def commit_next(state: State, active: Active) -> RuleAnswer:
    """Advance the commit: first the manifest, then the transaction in the store.

    If replicas differ, no step after the last right one is committed.
    """
    record, commit = active.generation, active.checkpointing.commit
    if record is None or record.state == "closed" or isinstance(active.phase, Opening | Closing):
        return PASS
    right = last_right_step(state, active)
    if commit is None:
        is_time = state.now >= active.checkpointing.retry_at
        return _begin_commit(state, active, record, right) if is_time else PASS
    if right is not None and commit.point.step > right and not commit.is_storing:
        return Step(change_checkpointing(state, active, commit=None))
    if commit.durable is None or commit.is_storing:
        return PASS
    storing = change_checkpointing(state, active, commit=replace(commit, is_storing=True))
    return Step(storing, (CommitCheckpoint(commit.durable, record),))


def _begin_commit(
    state: State, active: Active, record: GenerationRecord, right: int | None
) -> RuleAnswer:
    """Start with the oldest point that was uploaded completely and is not yet durable.

    One that failed before comes last: the next one may succeed.
    """
    last = state.durables.get(active.job)
    by_point: dict[Point, list[Uploaded]] = {}
    for node in state.nodes.values():
        report = node.report
        # Of thousands of nodes only few report uploads.
        if report is None or not report.uploaded or report.job not in (None, active.job):
            continue
        for upload in report.uploaded:
            is_late = last is not None and upload.point.step <= last.point.step
            is_wrong = right is not None and upload.point.step > right
            if upload.point.generation == record.number and not is_late and not is_wrong:
                by_point.setdefault(upload.point, []).append(upload)
    failed_at = active.checkpointing.failed_at
    for point in sorted(by_point, key=lambda point: (point == failed_at, point)):
        parts = covering(by_point[point], layers=state.job.layers, atoms=state.job.atoms)
        if parts is not None:
            write = WriteManifest(state.job, record, parts, point, last)
            return Step(change_checkpointing(state, active, commit=Commit(point)), (write,))
    return PASS


def collect_unneeded(state: State, active: Active) -> RuleAnswer:
    """Collect garbage in the durable store once a generation runs, and after each commit."""
    record, durable = active.generation, state.durables.get(active.job)
    if durable is None or record is None or not isinstance(active.phase, Running):
        return PASS
    if active.checkpointing.swept == (record.number, durable):
        return PASS
    if any(order.kind == "rollback" for order in active.orders):
        return PASS  # The rollback may be to an older checkpoint than retention keeps.
    command = CollectGarbage(state.job, record, durable)
    return Step(change_checkpointing(state, active, swept=(record.number, durable)), (command,))


# ---- durable on request -------------------------------------------------------------------------


def secure(state: State, active: Active, point: Point | None) -> RuleAnswer:
    """Make the last point durable before the job leaves its nodes.

    ``PASS``: it is durable, there is no point, the job keeps no checkpoints, or ``secure_s`` has
    passed.
    """
    if point is None:
        return PASS
    durable = state.durables.get(active.job)
    is_done = durable is not None and durable.point.step >= point.step
    if state.job.saving.uri is None or is_done:
        return PASS
    wanted = active.checkpointing.securing
    if wanted is None or wanted.point != point:
        wanted = Securing(point, state.now + state.options.secure_s)
        note = Note(f"waiting for step {point.step} to become durable", active.job)
        return Step(change_checkpointing(state, active, securing=wanted), (note,))
    return PASS if state.now >= wanted.until else WAIT


def follow_checkpoint_order(state: State, active: Active) -> RuleAnswer:
    """Make the newest complete snapshot durable, as an operator ordered."""
    orders = tuple(order for order in active.orders if order.kind == "checkpoint")
    record = active.generation
    if not orders or isinstance(active.phase, Opening | Closing):
        return PASS
    if state.job.saving.uri is None:
        return _answer(state, active, orders, "no checkpoint: the job names no place for them")
    if record is None or record.state == "closed":
        return _answer(state, active, orders, "no checkpoint: the job does not run")
    durable, wanted = state.durables.get(active.job), active.checkpointing.securing
    if wanted is None:
        point = newest_complete(state, active, record)
        if point is None:
            return PASS
        wanted = Securing(point, state.now + state.options.secure_s)
        return Step(change_checkpointing(state, active, securing=wanted))
    if durable is not None and durable.point.step >= wanted.point.step:
        step = durable.point.step
        return _answer(state, active, orders, f"step {step} is durable, as ordered", step)
    if state.now >= wanted.until:
        text = f"step {wanted.point.step} did not become durable in time"
        return _answer(state, active, orders, text)
    return PASS


def _answer(
    state: State, active: Active, orders: tuple[Order, ...], text: str, step: int | None = None
) -> Step:
    """Settle the orders; ``step`` is durable as they ordered, ``None``: they failed."""
    rest = tuple(order for order in active.orders if order not in orders)
    settled = change_checkpointing(state, replace(active, orders=rest), securing=None)
    ids = tuple(order.id for order in orders)
    told = Note(text, active.job, settled=Settled(ids, step))
    return Step(settled, (told, *map(SettleOrder, ids)))


def newest_complete(state: State, active: Active, record: GenerationRecord) -> Point | None:
    """Return the generation's newest point whose pieces are all in memory."""
    held = in_memory(state, active.job)
    shape = state.job.layers, state.job.atoms
    points = (p for p in complete_points(held, *shape) if p.generation == record.number)
    return max(points, default=None)


def check_first(state: State, active: Active, restore: Restore) -> RuleAnswer:
    """Check that a checkpoint can be read before a generation begins from it.

    ``PASS`` once that is known, either way; ``WAIT`` while it is being checked.
    """
    durable = state.durables.get(active.job)
    if restore.source != "durable" or durable is None or restore.point.step > durable.point.step:
        return PASS
    check = active.checkpointing.check
    if check is not None and (check.of, check.step_max) == (durable, None):
        is_known = check.found is not None or check.why_none
        return PASS if is_known else WAIT
    if state.now < active.checkpointing.retry_at:
        return WAIT
    last = active.generation
    # A generation that began from it failed at once: it may be damaged where a quick check misses.
    has_stepped = active.progress.step != restore.point.step
    is_suspect = last is not None and last.restore == restore and not has_stepped
    command = CheckDurable(state.job, durable, is_suspect)
    return Step(
        change_checkpointing(state, active, check=Check(durable, since=state.now)), (command,)
    )
