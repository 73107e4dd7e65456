"""Run the slow oracle on the simulator's types: groups with overheads, edges by number.

The oracle has no time in which a message blocks a device. The adapter adds such times as passes
of invisible groups on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.estimate.schedule_replay import Edge, GroupTimes
from simulator.hardware.runtime_constants import Messaging
from simulator.spec.plan import Schedule
from tests.simulator import oracle


@dataclass(frozen=True, slots=True)
class Verdict:
    """Start and end of each group's last backward, and when each device was free."""

    last_backward: tuple[tuple[float, float], ...]
    free: tuple[float, ...]
    """Per device."""
    spans: dict[tuple[int, str, int], tuple[float, float]]


def judge(
    groups: Sequence[GroupTimes],
    edges: Sequence[Edge],
    *,
    micro_batches: int,
    schedule: Schedule,
    messaging: Messaging,
    devices: int | None = None,
) -> Verdict:
    """Run the schedule on the oracle; only interleaved schedules need ``devices``."""
    names = [str(index) for index in range(len(groups))]
    known = [
        oracle.Group(
            name,
            group.stage,
            group.forward,
            group.backward,
            group.weight if schedule == "zero-bubble" else 0.0,
        )
        for name, group in zip(names, groups, strict=True)
    ]
    wires = [
        oracle.Edge(names[edge.source], names[edge.target], edge.activation, edge.gradient)
        for edge in edges
    ]
    stages = 1 + max(group.stage for group in groups)
    programs: list[oracle.Program] = []
    if messaging == "lockstep":
        programs = [oracle.lockstep_program(one, wires, stages, micro_batches) for one in known]
    elif schedule == "interleaved":
        assert devices is not None
        for device in range(devices):
            program: oracle.Program = []
            for kind, s, m in oracle.interleaved_order(device, devices, stages, micro_batches):
                program += _pass(known[s], wires, kind, m, holds=messaging == "blocking")
            programs.append(program)
    else:
        for one in known:
            if schedule == "gpipe":
                order = oracle.gpipe_order(micro_batches)
            elif schedule == "zero-bubble":
                order = oracle.zero_bubble_order(one.stage, stages, micro_batches)
            else:
                order = oracle.one_forward_one_backward_order(one.stage, stages, micro_batches)
            program = []
            for kind, m in order:
                program += _pass(one, wires, kind, m, holds=messaging == "blocking")
            programs.append(program)
    overheads = _Overheads(groups, wires)
    result = oracle.run_programs(
        [overheads.put_into(program) for program in programs], [*known, *overheads.groups], wires
    )
    return Verdict(
        tuple(result.last_backward_s[name] for name in names),
        tuple(result.free_s),
        {
            (int(name), kind, m): (begin, result.end_s[name, kind, m])
            for (name, kind, m), begin in result.start_s.items()
            if name in names
        },
    )


def _pass(
    group: oracle.Group, edges: Sequence[oracle.Edge], kind: oracle.Kind, m: int, *, holds: bool
) -> oracle.Program:
    if kind == "W":
        return [oracle.Compute(group.name, kind, m)]
    program: oracle.Program = []
    for index, edge in enumerate(edges):
        if group.name == (edge.target if kind == "F" else edge.source):
            program.append(oracle.Receive(index, kind, m))
    program.append(oracle.Compute(group.name, kind, m))
    for index, edge in enumerate(edges):
        if group.name == (edge.source if kind == "F" else edge.target):
            program.append(oracle.Send(index, kind, m, holds))
    return program


class _Overheads:
    """Invisible groups for the time that messages block a device, once per pass."""

    def __init__(self, groups: Sequence[GroupTimes], edges: Sequence[oracle.Edge]) -> None:
        self.edges = edges
        self.seconds = {
            (str(index), what, kind): seconds
            for index, group in enumerate(groups)
            for what, kind, seconds in (
                ("receive", "F", group.receive_activation),
                ("receive", "B", group.receive_gradient),
                ("send", "F", group.send_activation),
                ("send", "B", group.send_gradient),
            )
        }
        self.used: dict[str, oracle.Group] = {}

    @property
    def groups(self) -> list[oracle.Group]:
        return list(self.used.values())

    def put_into(self, program: oracle.Program) -> oracle.Program:
        found: oracle.Program = []
        for index, step in enumerate(program):
            before = program[index - 1] if index else None
            after = program[index + 1] if index + 1 < len(program) else None
            # All sends of a pass are announced at once, and all its arrivals taken in at once.
            if isinstance(step, oracle.Send) and not _goes_on(before, step):
                edge = self.edges[step.edge]
                sender = edge.source if step.kind == "F" else edge.target
                found += self._spend(sender, "send", step.kind, step.micro_batch)
            found.append(step)
            if isinstance(step, oracle.Receive) and not _goes_on(after, step):
                edge = self.edges[step.edge]
                receiver = edge.target if step.kind == "F" else edge.source
                found += self._spend(receiver, "receive", step.kind, step.micro_batch)
        return found

    def _spend(self, group: str, what: str, kind: oracle.Kind, m: int) -> oracle.Program:
        name = f"{group} {what} {kind}"
        self.used[name] = oracle.Group(name, 0, self.seconds[group, what, kind], 0.0)
        # The oracle wants a backward of every group.
        return [oracle.Compute(name, "F", m), oracle.Compute(name, "B", m)]


def _goes_on(neighbour: oracle.Instruction | None, step: oracle.Send | oracle.Receive) -> bool:
    return (
        isinstance(neighbour, type(step))
        and not isinstance(neighbour, oracle.Compute)
        and (neighbour.kind, neighbour.micro_batch) == (step.kind, step.micro_batch)
    )
