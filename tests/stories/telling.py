"""Stories: events are lines that begin with ``>``, written by hand; the replies are generated.

A line is ``> <seconds> <what> <words>``; see ``_EVENTS`` for the words of each. ``report`` is about
the current generation. The controller's commands follow below, then the job's phase if it changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agents.protocol.records import (
    Durable,
    Fence,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
    Sealed,
    Sealing,
)
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.model import commands, events
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import State

JOB = JobId("job")


@dataclass
class Story:
    """The controller, and the state that a story's lines leave implicit."""

    state: State = field(default_factory=State)
    written: GenerationRecord | None = None
    """The record that waits for the store's answer."""
    stored: GenerationRecord | None = None
    job: JobRecord = field(default_factory=lambda: JobRecord(JOB, "queued"))
    numbers: dict[str, int] = field(default_factory=dict)
    orders: int = 0

    def tell(self, line: str) -> list[str]:
        """Return the controller's reply to one line."""
        at, what, *words = line.removeprefix(">").split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        event = _EVENTS[what](self, float(at), names, values)
        before = self.state
        self.state, decided = decide(before, event)
        invariants.check(before, self.state, decided)
        told = [self._told(command) for command in decided if not self._is_bill(command)]
        if _phase(self.state) != _phase(before):
            told.append(f"  now {_phase(self.state)}")
        return told

    def _is_bill(self, command: commands.Command) -> bool:
        """Return whether the command only writes a job's bill, which stories leave out."""
        if not isinstance(command, commands.WriteJob):
            return False
        known, self.job = self.job, replace(self.job, bill=command.job.bill)
        return command.job == self.job != known

    def _told(self, command: commands.Command) -> str:
        match command:
            case commands.RequestPlan():
                return f"  ask for plan {command.request} on {_list(command.nodes)}"
            case commands.WriteGeneration():
                self.written = record = command.record
                restore = f"{record.restore.source} {record.restore.point.step}"
                members = _list(record.members)
                return (
                    f"  write generation {record.number} {record.state}: {members} from {restore}"
                )
            case commands.WriteJob():
                self.job = command.job
                return f"  write job {command.job.state}: {command.job.reason}"
            case commands.SettleOrder():
                return f"  settle {command.id}"
            case commands.AbortGeneration():
                return f"  abort generation {command.generation} on {_list(command.nodes)}"
            case commands.WakeAgents():
                return f"  wake {_list(command.nodes)}"
            case commands.ProbeAgent():
                return f"  probe {command.node}"
            case commands.Resign():
                return f"  resign: {command.why}"
            case commands.GiveOrder():
                return f"  order {command.order.kind} {command.order.target}"
            case commands.CheckDurable():
                before = (
                    "" if command.step_max is None else f", of step {command.step_max} or before"
                )
                return f"  look for a readable checkpoint{before}"
            case commands.WriteManifest() | commands.CommitCheckpoint():
                return f"  {type(command).__name__} of step {_step(command)}"
            case commands.CollectGarbage():
                return "  collect garbage of checkpoints"
            case commands.Note():
                return f"  note: {command.text}"


def _phase(state: State) -> str:
    if state.term is None:
        return "follows"
    if state.active is None:
        return "idle"
    return "planning" if state.active.question else type(state.active.phase).__name__.lower()


def _list(names: tuple[NodeId, ...]) -> str:
    return ", ".join(names) or "nobody"


def _nodes(names: list[str]) -> tuple[NodeRecord, ...]:
    """``a`` is ready, ``a:draining`` is something else."""
    records = []
    for name in names:
        id_, _, state = name.partition(":")
        records.append(
            NodeRecord(NodeId(id_), id_, "zone", "box", "A100-40", 1, id_, state or "ready")  # type: ignore[arg-type] # stories are written with care
        )
    return tuple(records)


def _elected(story: Story, at: float, names: list[str], values: dict[str, str]) -> events.Event:
    generations = () if story.stored is None else (story.stored,)
    term = int(values["term"])
    steps = values.get("steps")
    if steps is not None:
        story.job = JobRecord(JOB, "queued", steps=int(steps))
    return events.Elected(at, term, nodes=_nodes(names), jobs=(story.job,), generations=generations)


def _report(story: Story, at: float, names: list[str], values: dict[str, str]) -> events.Event:
    """``report a running step=5 sealed=5``: for layer 0 of one; ``sealed=5@1`` of generation 1."""
    name, taking = names[0], names[1]
    story.numbers[name] = story.numbers.get(name, 0) + 1
    generation = 0 if story.stored is None else story.stored.number
    sealed = []
    for mark in values.get("sealed", "").split(","):
        if mark:
            step, _, of = mark.partition("@")
            point = Point(int(step), int(of or generation))
            sealed.append(Sealed(point, (Holding(0, 0, 1),)))
    report = Report(
        node=NodeId(name),
        number=story.numbers[name],
        heard=Fence(1, generation),
        generation=0 if taking == "idle" else generation,
        taking=taking,  # type: ignore[arg-type] # stories are written with care
        step=int(values.get("step", "0")),
        sealed=tuple(sealed),
        broken_peers=tuple(NodeId(n) for n in values.get("lost", "").split(",") if n),
        contradicted=tuple(NodeId(n) for n in values.get("contradicts", "").split(",") if n),
        agreed_at=int(values["agreed"]) if "agreed" in values else None,
        failure=values.get("why", "").replace("_", " "),
        is_bug="bug" in names,
        sealing=_sealing(values),
    )
    return events.Reported(at, report)


def _sealing(values: dict[str, str]) -> Sealing | None:
    """``seals=31 in=7``: it seals step 31 and expects to need 7 s."""
    return Sealing(int(values["seals"]), float(values["in"])) if "seals" in values else None


def _written(story: Story, at: float, *_: object) -> events.Event:
    assert story.written is not None, "nothing waits to be written"
    story.stored = story.written
    return events.GenerationWritten(at, story.written)


def _plan(_: Story, at: float, names: list[str], values: dict[str, str]) -> events.Event:
    """``plan 1 a b``; ``worth=no`` if moving does not pay, ``name=`` for the same plan again,
    ``step=`` for its seconds, ``next=`` for those of the next move."""
    request, *nodes = names
    members = tuple(NodeId(node) for node in sorted(nodes))
    plan = values.get("name", "plan-" + "".join(sorted(nodes)))
    worth = values.get("worth", "yes") == "yes"
    why = "it pays" if worth else "it would not pay"
    step_s = float(values.get("step", "0.5"))
    next_s = float(values["next"]) if "next" in values else None
    found = Proposal(plan, members, worth, why, step_s, 1.0, next_s)
    return events.PlanFound(at, int(request), found)


def _order(story: Story, at: float, names: list[str], values: dict[str, str]) -> events.Event:
    """``order drain a``, ``order pause job``; ``leaves=`` for a notice."""
    story.orders += 1
    leaves = values.get("leaves")
    id_ = values.get("id", f"order-{story.orders}")
    leaves_at = None if leaves is None else float(leaves)
    return events.OrderGiven(at, Order(id_, names[0], names[1], leaves_at))  # type: ignore[arg-type] # stories are written with care


def _step(command: commands.WriteManifest | commands.CommitCheckpoint) -> int:
    point = command.point if isinstance(command, commands.WriteManifest) else command.durable.point
    return point.step


def _durable(names: list[str]) -> Durable:
    """``40 1``: of step 40 and generation 1."""
    return Durable(Point(int(names[0]), int(names[1])), f"manifest-{names[0]}", "")


def _readable(story: Story, at: float, names: list[str], values: dict[str, str]) -> events.Event:
    """``readable 40 1 max=41``: what was looked for; without a step there is none."""
    step_max = int(values["max"]) if "max" in values else None
    found, of = _durable(names) if names else None, story.state.durables[JOB]
    why = "" if names else "no readable checkpoint"
    return events.DurableChecked(at, JOB, of, found, why, step_max=step_max)


_EVENTS: dict[str, Callable[[Story, float, list[str], dict[str, str]], events.Event]] = {
    "elected": _elected,
    "report": _report,
    "written": _written,
    "plan": _plan,
    "order": _order,
    "deposed": lambda _, at, __, ___: events.Deposed(at),
    "nodes": lambda _, at, names, __: events.NodesObserved(at, _nodes(names)),
    "silent": lambda _, at, names, __: events.ProbeFailed(at, NodeId(names[0])),
    "submit": lambda story, at, _, __: events.JobSubmitted(at, story.job),
    "refused": lambda _, at, names, __: events.PlanRefused(at, int(names[0]), " ".join(names[1:])),
    "conflict": lambda _, at, __, ___: events.WriteRefused(at),
    "back": lambda _, at, __, ___: events.StoreReturned(at),
    "durable": lambda _, at, names, __: events.CheckpointCommitted(at, JOB, _durable(names)),
    "readable": _readable,
    "tick": lambda _, at, __, ___: events.Ticked(at),
}


def told(text: str) -> str:
    """Return the story with the controller's present replies."""
    story = Story()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            lines += [line, *story.tell(line)]
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines) + "\n"
