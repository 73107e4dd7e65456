"""What changed between two states, as events for the feed and ids of messages to webhooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.protocol.records import ENDED, JobId, NodeId, Order
from sailord.core.model.phases import Running
from sailord.core.model.state import Active, State
from sailord.notify.feed import EventKind, FeedEvent
from sailord.notify.outbox import committed_id
from sailord.text.units import counted, duration


def changes_of_nodes(
    before: State, after: State, of_jobs: Mapping[JobId, State]
) -> Iterator[tuple[FeedEvent, str]]:
    """What happened to nodes and checkpoints, each with the id of its message to webhooks.

    An empty id: no message, or the message is written together with the record (see ``outbox``).
    ``of_jobs``: the parts of the jobs that run.
    """
    for job, durable in after.durables.items():
        if before.durables.get(job) != durable:
            text = f"step {durable.point.step} is durable"
            event = event_at("checkpoint_committed", text, of_jobs.get(job, after), job=job)
            yield event, committed_id(job, durable)
    for id_ in sorted(after.nodes.notable):
        node, known = after.nodes[id_], before.nodes.get(id_)
        if node is known:
            continue
        part = _part_of(id_, of_jobs) or after
        if node.is_lost and (known is None or not known.is_lost):
            text = f"{node.record.name} is lost: {node.why_lost}"
            yield event_at("node_lost", text, part, node=node.record.name), ""
        if not node.is_draining:
            continue
        if node.exclusion.draining_since is None:
            if known is None or not known.is_draining:
                text = f"{node.record.name} drains to go to another job"
                yield event_at("note", text, part, node=node.record.name), ""
            continue
        when = node.record.leaves_at
        if (
            known is None
            or known.exclusion.draining_since is None
            or when not in (None, known.record.leaves_at)
        ):
            text = f"{node.record.name} is draining"
            event = event_at("node_preempted", text, part, node=node.record.name)
            yield event, _leaving_id(id_, when, after.marks.get(id_, ()))
    is_less = after.term == before.term and len(after.nodes) < len(before.nodes)
    for id_ in sorted(before.nodes.keys() - after.nodes.keys()) if is_less else ():
        node = before.nodes[id_]
        if not node.is_lost:  # That was told when it was given up.
            announced = ", as it was announced" if node.is_draining else ""
            text = f"{node.record.name} left: its lease ended{announced}"
            yield event_at("note", text, after, node=node.record.name), ""


def _part_of(id_: NodeId, of_jobs: Mapping[JobId, State]) -> State | None:
    """Return the part of the job that has the node in its generation."""
    for part in of_jobs.values():
        generation = None if part.active is None else part.active.generation
        if generation is not None and id_ in generation.members:
            return part
    return None


def changes_of_job(before: State, after: State) -> Iterator[tuple[FeedEvent, str]]:
    """What happened to the active job, as ``changes_of_nodes`` returns it."""
    trouble = "" if after.active is None else after.active.checkpointing.trouble
    if after.active is not None and trouble:
        known_trouble = "" if before.active is None else before.active.checkpointing.trouble
        if trouble != known_trouble:
            text = f"checkpoint storage: {trouble}"
            yield event_at("note", text, after, job=after.active.job), ""
    yield from _recoveries(before, after)
    yield from _changes_of_phase(before, after)


def _recoveries(before: State, after: State) -> Iterator[tuple[FeedEvent, str]]:
    """Which slow members of a generation that goes on are so no longer."""
    then, now = before.active, after.active
    if then is None or now is None or not _runs(then) or not _runs(now):
        return
    generation, speeds = now.generation, now.slowness.speeds
    if generation is None or then.generation != generation or then.slowness.speeds is speeds:
        return
    training = {id_ for id_, said in after.reports_of(generation) if said.taking == "running"}
    gpus = sum(after.nodes[id_].record.gpus for id_ in generation.members if id_ in after.nodes)
    for id_, slow in then.slowness.speeds.told(before.now, before.options).items():
        if id_ in training and id_ in speeds.recovered:
            name, lasted_s = after.nodes[id_].record.name, after.now - slow.since
            text = f"{name} is no longer slow, after {duration(lasted_s)}"
            if slow.delay_s:
                cost = f"{duration(slow.delay_s)} of {counted(gpus, 'GPU')}"
                text += f" that cost about {cost}"
            yield event_at("note", text, after, job=now.job, node=name), ""


def _leaving_id(id_: NodeId, when: float | None, marks: Sequence[Order]) -> str:
    """The id of the message that a node leaves: equal under each leader, new for each departure.

    It contains the id of the order that began the departure: the first after the last withdrawal.
    """
    began = ""
    for order in marks:
        if order.kind == "withdraw":
            began = ""
        elif order.kind in ("preempt", "drain"):
            began = began or order.id
    parts = (id_, "leaves", "" if when is None else str(int(when)), began)
    return ".".join(part for part in parts if part)


def _changes_of_phase(before: State, after: State) -> Iterator[tuple[FeedEvent, str]]:
    now, then = after.active, before.active
    if now is not None and now.generation is not None:
        job, number = now.job, now.generation.number
        known = then.generation.number if then is not None and then.generation else 0
        # A generation that was closed before a pause comes back with its job, and is not opened.
        if number > known and now.generation.state != "closed":
            text = f"generation {number} is open: {now.generation.reason}"
            yield event_at("generation_opened", text, after, job=job, is_detail=True), ""
        was_running = then is not None and _runs(then) and number == known
        if _runs(now) and not was_running:
            text = f"generation {number} runs"
            event = event_at("generation_running", text, after, job=job, is_detail=True)
            yield event, f"{job}.{number}.running"
    if now is not None and after.job.state == "held" and then and before.job.state != "held":
        yield event_at("job_held", after.job.reason, after, job=now.job), ""
    # Also of one in the queue, and where the next job has the cluster at once.
    for id_, ended in after.jobs.items() if after.jobs is not before.jobs else ():
        known_job = before.jobs.get(id_)
        if ended.state in ENDED and known_job is not None and known_job.state not in ENDED:
            about = {"job": id_, "generation": None, "step": None}
            yield event_at("job_finished", f"{ended.state}: {ended.reason}", after, **about), ""


def _runs(active: Active) -> bool:
    """Whether the generation runs, also while a next plan is being computed."""
    return isinstance(active.phase, Running)


def event_at(kind: EventKind, text: str, state: State, **others: Any) -> FeedEvent:
    """Return an event that has no id yet.

    It is of the step of the active job unless it is of another job, or ``others`` say.
    """
    is_other = state.active is not None and others.get("job") not in (None, state.active.job)
    generation, step = where(None if is_other else state.active)
    facts = {"generation": generation, "step": step, "term": state.term or 0} | others
    return FeedEvent(0, state.now, kind, text, **facts)


def where(active: Active | None) -> tuple[int, int] | tuple[None, None]:
    """Return a job's generation and step, if it has any."""
    if active is None or active.generation is None:
        return None, None
    return active.generation.number, active.progress.step
