"""A slow, simple simulator of pipeline schedules and gradient sync, to check the product with.

It shares no code or structure with the product. Every device gets a *program*, a list of
instructions that it executes strictly in order:

* ``Compute``: the forward or backward pass of one micro batch, or that of its weights;
* ``Receive``: wait until one payload has arrived over one edge;
* ``Send``: hand one payload to an edge, which carries one payload of a kind at a time, in order.

The programs are run by going round the devices until none can proceed. Unfinished programs are
reported as a deadlock. The schedules ("1f1b", "gpipe", "interleaved", "zero-bubble") and the ways
of sending ("buffered", "blocking", "lockstep") are only different programs.
``tests/simulator/estimate/test_oracle.py`` checks it against diagrams drawn by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["F", "B", "W"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Sending = Literal["buffered", "blocking", "lockstep"]
Order = list[tuple[Kind, int]]


@dataclass(frozen=True, slots=True)
class Group:
    """One device group: it holds a stage, or a share of a stage that is split."""

    name: str
    stage: int
    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """The part of the backward that is a pass "W" of its own, where there are such passes."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A link from a group to a group of the next stage, with one micro batch's transfer times."""

    source: str
    target: str
    activation_s: float = 0.0
    gradient_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compute:
    """Do one pass of one micro batch in one group."""

    group: str
    kind: Kind
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for what pass ``kind`` of the neighbour sent: F an activation, B a gradient."""

    edge: int
    kind: Kind
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Pass on the result of a pass ``kind``; if ``holds``, the device waits for the transfer."""

    edge: int
    kind: Kind
    micro_batch: int
    holds: bool = False


Instruction = Compute | Receive | Send
Program = list[Instruction]


@dataclass(slots=True)
class Result:
    """When everything happened; passes are keyed by (group, kind, micro batch)."""

    start_s: dict[tuple[str, Kind, int], float] = field(default_factory=dict)
    end_s: dict[tuple[str, Kind, int], float] = field(default_factory=dict)
    arrival_s: dict[tuple[int, Kind, int], float] = field(default_factory=dict)  # by edge index
    # By device. Busy is compute, the sends that held it and the cost of its instructions;
    # free is when its whole program was over.
    compute_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    last_backward_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # (start, end)

    @property
    def makespan_s(self) -> float:
        """When the last device was done; transfers that block no device may still be in flight."""
        return max(self.free_s)


def simulate_pipeline(
    groups: Sequence[Group],
    edges: Sequence[Edge],
    *,
    micro_batches: int,
    schedule: Schedule,
    sending: Sending = "buffered",
    instruction_s: float = 0.0,
    devices: int | None = None,
) -> Result:
    """Say when each pass of each micro batch begins and ends.

    Devices are numbered as the groups stand in ``groups``, except for "interleaved", where stage
    k of all the stages runs on device k mod ``devices``. An edge counts as a channel of its own
    for each of the two directions, also where two edges join the same two devices.
    """
    stages = 1 + max(group.stage for group in groups)
    _check(groups, edges, stages)
    assert instruction_s == 0.0 or sending == "lockstep"
    assert (devices is not None) == (schedule == "interleaved")
    programs: list[Program]
    if sending == "lockstep":
        assert schedule == "1f1b", "only the 1F1B order is defined for lockstep"
        assert len(groups) == stages, "only plain pipelines are defined for lockstep"
        programs = [lockstep_program(group, edges, stages, micro_batches) for group in groups]
    elif devices is not None:
        by_stage = {group.stage: group for group in groups}
        assert len(groups) == stages, "only plain pipelines are defined for interleaved"
        assert stages % devices == 0
        programs = []
        for device in range(devices):
            program: Program = []
            for kind, stage, m in interleaved_order(device, devices, stages, micro_batches):
                program += _pass(by_stage[stage], edges, kind, m, holds=sending == "blocking")
            programs.append(program)
    else:
        programs = []
        for group in groups:
            if schedule == "zero-bubble":
                order = zero_bubble_order(group.stage, stages, micro_batches)
            elif schedule == "1f1b":
                order = one_forward_one_backward_order(group.stage, stages, micro_batches)
            else:
                order = gpipe_order(micro_batches)
            program = []
            for kind, m in order:
                program += _pass(group, edges, kind, m, holds=sending == "blocking")
            programs.append(program)
    return run_programs(programs, groups, edges, instruction_s=instruction_s)


def _check(groups: Sequence[Group], edges: Sequence[Edge], stages: int) -> None:
    stage_of = {group.name: group.stage for group in groups}
    assert len(stage_of) == len(groups), "group names must differ"
    assert set(stage_of.values()) == set(range(stages)), "a stage has no group"
    for edge in edges:
        assert stage_of[edge.target] == stage_of[edge.source] + 1, f"{edge} skips a stage"
    for group in groups:
        fed = group.stage == 0 or any(edge.target == group.name for edge in edges)
        heard = group.stage == stages - 1 or any(edge.source == group.name for edge in edges)
        assert fed, f"no edge leads to {group.name}"
        assert heard, f"no edge leaves {group.name}"


# The orders of passes ------------------------------------------------------------------------


def gpipe_order(micro_batches: int) -> Order:
    """All forward passes, then all backward passes."""
    forwards: Order = [("F", m) for m in range(micro_batches)]
    backwards: Order = [("B", m) for m in range(micro_batches)]
    return forwards + backwards


def one_forward_one_backward_order(stage: int, stages: int, micro_batches: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then the last backwards."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order: Order = [("F", m) for m in range(warm_up)]
    for m in range(micro_batches):
        if warm_up + m < micro_batches:
            order.append(("F", warm_up + m))
        order.append(("B", m))
    return order


def zero_bubble_order(stage: int, stages: int, micro_batches: int) -> Order:
    """1F1B, where at most as many weight passes wait as there are stages before this one."""
    order: Order = []
    waiting: list[int] = []
    for kind, m in one_forward_one_backward_order(stage, stages, micro_batches):
        order.append((kind, m))
        if kind == "B":
            waiting.append(m)
        if len(waiting) > stage:
            order.append(("W", waiting.pop(0)))
    return [*order, *(("W", m) for m in waiting)]


def interleaved_order(
    device: int, devices: int, stages: int, micro_batches: int
) -> list[tuple[Kind, int, int]]:
    """The (kind, stage, micro batch) that one device does in Megatron's interleaved 1F1B."""
    assert micro_batches % devices == 0, "interleaving needs micro batches in whole rounds"
    chunks = stages // devices
    total = micro_batches * chunks
    forwards: list[tuple[Kind, int, int]] = []
    backwards: list[tuple[Kind, int, int]] = []
    for unit in range(total):
        chunk = unit % (devices * chunks) // devices
        m = unit // (devices * chunks) * devices + unit % devices
        forwards.append(("F", chunk * devices + device, m))
        backwards.append(("B", (chunks - 1 - chunk) * devices + device, m))
    warm_up = min((devices - device - 1) * 2 + (chunks - 1) * devices, total)
    if micro_batches == devices:
        warm_up = total
    order = forwards[:warm_up]
    for unit in range(total):
        order += forwards[warm_up + unit : warm_up + unit + 1]
        order.append(backwards[unit])
    return order


# From orders to programs -----------------------------------------------------------------------


def _receives(group: Group, edges: Sequence[Edge], kind: Kind, m: int) -> Program:
    """Everything that a pass waits for, over all the edges that bring it."""
    return [
        Receive(index, kind, m)
        for index, edge in enumerate(edges)
        if group.name == (edge.target if kind == "F" else edge.source)
    ]


def _sends(
    group: Group, edges: Sequence[Edge], kind: Kind, m: int, *, holds: bool = False
) -> Program:
    """Everything that a pass passes on, one edge after the other."""
    return [
        Send(index, kind, m, holds)
        for index, edge in enumerate(edges)
        if group.name == (edge.source if kind == "F" else edge.target)
    ]


def _pass(group: Group, edges: Sequence[Edge], kind: Kind, m: int, *, holds: bool) -> Program:
    if kind == "W":
        return [Compute(group.name, "W", m)]
    return [
        *_receives(group, edges, kind, m),
        Compute(group.name, kind, m),
        *_sends(group, edges, kind, m, holds=holds),
    ]


def lockstep_program(
    group: Group, edges: Sequence[Edge], stages: int, micro_batches: int
) -> Program:
    """One stage's instructions in the order in which DeepSpeed's training schedule issues them.

    Source: ``TrainSchedule`` in deepspeed/runtime/pipe/schedule.py. Old releases have the other
    order in each slot (activation taken before the gradient goes, activation sent before the
    gradient is taken); this is the order of the newer ones.

    The schedule counts slots that are forward and backward in turn. Stage s does forward m in
    slot 2m + s and backward m in slot 2m + 2S - s - 1; other slots do no pass. A result is sent
    in the slot after its pass, full or not: in a forward slot a gradient goes out *before* the
    activation is awaited, in a backward slot an activation goes out *after* the gradient came.
    """
    program: Program = []
    # The pass in the last slot is the first stage's, which has no receiver.
    for slot in range(2 * (micro_batches + stages - 1)):
        forward = (slot - group.stage) % 2 == 0
        here: Kind = "F" if forward else "B"
        before: Kind = "B" if forward else "F"
        m_here = _micro_batch_in(slot, here, group.stage, stages)
        m_before = _micro_batch_in(slot - 1, before, group.stage, stages)
        sends: Program = []
        if 0 <= m_before < micro_batches:
            sends = _sends(group, edges, before, m_before)
        receives: Program = []
        compute: Program = []
        if 0 <= m_here < micro_batches:
            receives = _receives(group, edges, here, m_here)
            compute = [Compute(group.name, here, m_here)]
        program += sends + receives if forward else receives + sends
        program += compute
    return program


def _micro_batch_in(slot: int, kind: Kind, stage: int, stages: int) -> int:
    first_slot = stage if kind == "F" else 2 * stages - stage - 1
    return (slot - first_slot) // 2


# Running the programs --------------------------------------------------------------------------


def run_programs(
    programs: Sequence[Program],
    groups: Sequence[Group],
    edges: Sequence[Edge],
    *,
    instruction_s: float = 0.0,
) -> Result:
    """Walk round the devices until nothing moves; what is then left over is a deadlock."""
    result = Result(
        compute_s=[0.0] * len(programs), busy_s=[0.0] * len(programs), free_s=[0.0] * len(programs)
    )
    by_name = {group.name: group for group in groups}
    channel_free_s: dict[tuple[int, Kind], float] = {}
    done = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            while done[device] < len(program):
                instruction = program[done[device]]
                if not _can_run(instruction, result):
                    break
                if isinstance(instruction, Compute):
                    _compute(instruction, device, by_name[instruction.group], result)
                elif isinstance(instruction, Receive):
                    _receive(instruction, device, instruction_s, result)
                else:
                    edge = edges[instruction.edge]
                    _send(instruction, device, edge, instruction_s, channel_free_s, result)
                done[device] += 1
                moved = True
    stuck = [
        f"device {device}: {program[done[device]]}"
        for device, program in enumerate(programs)
        if done[device] < len(program)
    ]
    if stuck:
        raise AssertionError("deadlock, stuck at " + "; ".join(stuck))
    for group in groups:
        passes = [key for key in result.end_s if key[0] == group.name and key[1] != "F"]
        last = max(passes, key=lambda key: result.end_s[key])
        result.last_backward_s[group.name] = (result.start_s[last], result.end_s[last])
    return result


def _can_run(instruction: Instruction, result: Result) -> bool:
    match instruction:
        case Compute(group, "B", m):
            return (group, "F", m) in result.end_s
        case Compute(group, "W", m):
            return (group, "B", m) in result.end_s
        case Receive(edge, kind, m):
            return (edge, kind, m) in result.arrival_s
        case _:
            return True


def _compute(instruction: Compute, device: int, group: Group, result: Result) -> None:
    key = (instruction.group, instruction.kind, instruction.micro_batch)
    duration_s = {
        "F": group.forward_s,
        "B": group.backward_s - group.weight_s,
        "W": group.weight_s,
    }[instruction.kind]
    assert key not in result.end_s, f"{key} was done twice"
    result.start_s[key] = result.free_s[device]
    result.end_s[key] = result.free_s[device] + duration_s
    result.free_s[device] += duration_s
    result.compute_s[device] += duration_s
    result.busy_s[device] += duration_s


def _receive(instruction: Receive, device: int, instruction_s: float, result: Result) -> None:
    arrival_s = result.arrival_s[instruction.edge, instruction.kind, instruction.micro_batch]
    result.free_s[device] = max(result.free_s[device], arrival_s) + instruction_s
    result.busy_s[device] += instruction_s


def _send(
    instruction: Send,
    device: int,
    edge: Edge,
    instruction_s: float,
    channel_free_s: dict[tuple[int, Kind], float],
    result: Result,
) -> None:
    made_by = edge.source if instruction.kind == "F" else edge.target
    assert (made_by, instruction.kind, instruction.micro_batch) in result.end_s
    result.free_s[device] += instruction_s
    result.busy_s[device] += instruction_s
    issued_s = result.free_s[device]
    channel = (instruction.edge, instruction.kind)
    duration_s = edge.activation_s if instruction.kind == "F" else edge.gradient_s
    arrival_s = max(issued_s, channel_free_s.get(channel, 0.0)) + duration_s
    channel_free_s[channel] = arrival_s
    result.arrival_s[instruction.edge, instruction.kind, instruction.micro_batch] = arrival_s
    if instruction.holds:
        result.free_s[device] = arrival_s
        result.busy_s[device] += arrival_s - issued_s


# Gradient synchronisation ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyncJob:
    """One exchange of gradients; ``ready_s`` says per holder when its gradients are there."""

    duration_s: float
    ready_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SyncResult:
    """When each job, each holder's last job and each holder's optimizer step were over."""

    job_end_s: list[float]
    holder_end_s: dict[str, float]  # holders with a job only
    step_end_s: dict[str, float]
    iteration_s: float


def simulate_sync(
    backward_end_s: Mapping[str, float],
    jobs: Sequence[SyncJob],
    *,
    optimizer_s: Mapping[str, float],
    mode: Literal["serial", "overlap"],
) -> SyncResult:
    """Say when the gradients are exchanged and the iteration is over.

    A job occupies all its holders, and each holder does its jobs in the order of ``jobs``. With
    "serial" a holder begins when its last backward pass has ended, whatever the job says.
    """
    assert backward_end_s.keys() == optimizer_s.keys()
    job_end_s: list[float] = []
    holder_end_s: dict[str, float] = {}
    for job in jobs:
        start_s = 0.0
        for holder, ready_s in job.ready_s.items():
            own_s = backward_end_s[holder] if mode == "serial" else ready_s
            start_s = max(start_s, own_s, holder_end_s.get(holder, 0.0))
        end_s = start_s + job.duration_s
        job_end_s.append(end_s)
        for holder in job.ready_s:
            holder_end_s[holder] = end_s
    step_end_s = {}
    for holder, end_s in backward_end_s.items():
        # A step changes what backward passes read, so it never comes before the last of them.
        step_end_s[holder] = max(end_s, holder_end_s.get(holder, 0.0)) + optimizer_s[holder]
    return SyncResult(job_end_s, holder_end_s, step_end_s, max(step_end_s.values()))
