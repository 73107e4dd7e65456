"""Replays one pipeline pass by pass: for timelines, split stages, and all schedules but 1F1B.

Handles all schedules and any graph of device groups and records the start and end of each pass,
at the cost of one Python step per pass. ``simulator.estimate.schedule_1f1b`` computes the same
end times for unsplit 1F1B pipelines much faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.estimate.pass_order import Op, device_orders
from simulator.hardware.runtime_constants import Messaging
from simulator.spec.plan import Schedule


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds per micro batch of one device group on one stage."""

    stage: int
    forward: float
    backward: float
    receive_activation: float = 0.0
    receive_gradient: float = 0.0
    send_activation: float = 0.0
    send_gradient: float = 0.0
    weight: float = 0.0
    """The part of ``backward`` that a divided backward does later: the gradient of the weights."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A channel between groups of neighbouring stages, with its transfer seconds."""

    source: int
    target: int
    activation: float
    gradient: float


@dataclass(frozen=True, slots=True)
class PassSpan:
    """The start and end of one pass of a micro batch on a group."""

    group: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ScheduleReplay:
    """All passes of a pipeline, and when its groups and devices finished."""

    spans: tuple[PassSpan, ...]
    last_backward_end: tuple[float, ...]
    """When each group has all gradients of its weights."""
    free: tuple[float, ...]
    """When each device has finished; with interleaving a device runs several groups."""
    device_of: tuple[int, ...]


_Instruction = tuple[str, int, int]
"""(operation, group, micro batch): F, B and W are passes, SA, SG, RA and RG send and receive
activations and gradients."""


def replay(
    groups: Sequence[GroupTimes],
    edges: Sequence[Edge],
    *,
    schedule: Schedule,
    micro_batches: int,
    messaging: Messaging,
    virtual_stages: int = 1,
) -> ScheduleReplay:
    """Replay a pipeline pass by pass."""
    stages = max(group.stage for group in groups) + 1
    orders = device_orders(
        schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    lockstep = messaging == "lockstep"
    assert not lockstep or (schedule == "1f1b" and len(groups) == stages)
    programs: list[list[_Instruction]] = []
    divides = schedule == "zero-bubble"
    if virtual_stages > 1:
        device_of = tuple(group.stage % len(orders) for group in groups)
        group_of = {group.stage: index for index, group in enumerate(groups)}
        for order in orders:
            programs.append([step for op in order for step in _eager(op, group_of[op.stage])])
    else:
        device_of = tuple(range(len(groups)))
        for index, group in enumerate(groups):
            order = orders[group.stage]
            programs.append(
                _lockstep(order, index, stages)
                if lockstep
                else [step for op in order for step in _eager(op, index)]
            )
    seconds = [
        {"F": each.forward, "B": each.backward - each.weight * divides, "W": each.weight}
        for each in groups
    ]
    return _execute(programs, groups, edges, device_of, seconds, blocking=messaging == "blocking")


def _eager(op: Op, group: int) -> list[_Instruction]:
    if op.kind == "W":
        return [("W", group, op.micro_batch)]
    return [
        ("RA" if op.kind == "F" else "RG", group, op.micro_batch),
        (op.kind, group, op.micro_batch),
        ("SA" if op.kind == "F" else "SG", group, op.micro_batch),
    ]


def _lockstep(order: list[Op], group: int, stages: int) -> list[_Instruction]:
    """Return DeepSpeed's order, in which a pass's result is sent one slot later."""
    slots: list[tuple[int, int, _Instruction]] = []
    for op in order:
        stage, m = op.stage, op.micro_batch
        slot = 2 * m + stage if op.kind == "F" else 2 * m + 2 * stages - stage - 1
        receive, send = ("RA", "SA") if op.kind == "F" else ("RG", "SG")
        slots.append((slot, 1, (receive, group, m)))
        slots.append((slot, 3, (op.kind, group, m)))
        slots.append((slot + 1, 0 if send == "SG" else 2, (send, group, m)))
    return [instruction for _, _, instruction in sorted(slots)]


def _execute(
    programs: list[list[_Instruction]],
    groups: Sequence[GroupTimes],
    edges: Sequence[Edge],
    device_of: tuple[int, ...],
    seconds: Sequence[Mapping[str, float]],
    *,
    blocking: bool,
) -> ScheduleReplay:
    """Run each device until it has to wait, in rounds, until all are done."""
    after: list[list[int]] = [[] for _ in groups]
    before: list[list[int]] = [[] for _ in groups]
    for index, edge in enumerate(edges):
        after[edge.source].append(index)
        before[edge.target].append(index)
    arrivals: dict[tuple[str, int, int], float] = {}
    channels: dict[tuple[str, int], float] = {}
    clock = [0.0] * len(programs)
    position = [0] * len(programs)
    last_backward = [0.0] * len(groups)
    spans: list[PassSpan] = []
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            now = clock[device]
            while position[device] < len(program):
                what, index, m = program[position[device]]
                group = groups[index]
                if what in ("F", "B", "W"):
                    start = now
                    now += seconds[index][what]
                    spans.append(PassSpan(index, what, m, start, now))
                    if what != "F":
                        last_backward[index] = now
                elif what in ("SA", "SG"):
                    forward = what == "SA"
                    targets = after[index] if forward else before[index]
                    if targets:
                        now += group.send_activation if forward else group.send_gradient
                    for channel in targets:
                        edge = edges[channel]
                        took = edge.activation if forward else edge.gradient
                        key = (what, channel)
                        arrival = max(now, channels.get(key, 0.0)) + took
                        channels[key] = arrivals[(*key, m)] = arrival
                        if blocking:
                            now = arrival
                else:
                    forward = what == "RA"
                    sources = before[index] if forward else after[index]
                    sent = [("SA" if forward else "SG", channel, m) for channel in sources]
                    if any(key not in arrivals for key in sent):
                        break
                    if sent:
                        now = max(now, *(arrivals[key] for key in sent))
                        now += group.receive_activation if forward else group.receive_gradient
                position[device] += 1
                moved = True
            clock[device] = now
    assert all(done == len(program) for done, program in zip(position, programs, strict=True)), (
        "the schedule deadlocks"
    )
    return ScheduleReplay(tuple(spans), tuple(last_backward), tuple(clock), device_of)
