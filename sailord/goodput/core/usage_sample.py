"""Reads a sample from the controller's state: which cause holds each paid GPU now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from agents.protocol.records import PREPARING, GenerationRecord, JobId, NodeId, NodeRecord, Report
from sailord.capacity.core.model import CapacityState
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Closing, Held, Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import usable
from sailord.goodput.core.causes import Cause
from sailord.goodput.core.ledger import IN_STEP, CauseLoad, OtherJobLoads, StepProgress, UsageSample

PriceOf = Callable[[NodeRecord], float | None]
"""Dollars an hour of a node that is not rented; ``None``: unknown."""
_BY_TAKING: Mapping[str, Cause] = {
    "idle": "moving_fetch",
    "fetching": "moving_fetch",
    "rebuilding": "moving_rebuild",
    "verifying": "moving_verify",
    "running": "moving_first_step",
    "stopped": "moving_first_step",
    "broken": "moving_detect",
    "failed": "moving_detect",
}
"""While a generation starts: each member by its own report."""


@dataclass(frozen=True, slots=True)
class Rented:
    """A rented instance."""

    name: str
    """The node's name; the provider's number while that is unknown."""
    gpus: int
    usd_per_hour: float | None
    has_joined: bool
    is_leaving: bool


@dataclass(frozen=True, slots=True)
class Renting:
    """What is rented, and the provider's bill for all that was."""

    instances: tuple[Rented, ...] = ()
    ended_nodes: frozenset[str] = frozenset()
    """Nodes that are not paid for any more, although sailord may not have given them up yet."""
    bill_usd: float | None = None
    """``None``: there is no provider."""
    bill_gpu_us: int | None = None


def renting_of(capacity: CapacityState, now: float) -> Renting:
    """Return what the provider bills."""
    instances: Collection[RentedInstance] = capacity.instances.values()
    rented = tuple(
        Rented(
            each.instance.node or each.instance.id,
            each.instance.pool.gpus,
            each.usd_per_hour,
            each.joined_at is not None,
            bool(each.why) or each.is_leaving or each.is_drained,
        )
        for each in instances
        if each.ended_at is None
    )
    ended = (each.instance.node for each in instances if each.ended_at is not None)
    return Renting(
        rented,
        frozenset((*capacity.ended_nodes, *ended)),
        capacity.spent_usd + sum(each.usd(now) for each in instances),
        capacity.spent_gpu_us + sum(each.gpu_us(now) for each in instances),
    )


@dataclass(slots=True)
class _Sums:
    """A ``CauseLoad`` while GPUs are added to it."""

    gpus: int = 0
    usd_per_hour: float = 0.0
    rented_usd_per_hour: float = 0.0
    unpriced_gpus: int = 0
    rented_gpus: int = 0


def sample_usage(
    state: State,
    price: PriceOf,
    renting: Renting,
    *,
    trained: tuple[str, int] | None = None,
    lives: Collection[NodeId] | None = None,
) -> UsageSample:
    """Return the sample of this moment.

    ``lives``: the newest lives of all nodes where ``state`` has only those of a part.
    ``trained``: the job and generation that trained at the last sample. A new leader, which has no
    reports yet, believes that it still does.
    """
    active = state.active
    goes_on = active is not None and _trains(active, trained)
    by_phase = _cause_of_phase(state, goes_on=goes_on)
    members = _members(active)
    by_name = {each.name: each for each in renting.instances}
    ended_nodes = renting.ended_nodes - by_name.keys()
    found: dict[Cause, _Sums] = {}

    def add(cause: Cause, gpus: int, usd_per_hour: float | None, *, is_rented: bool) -> None:
        sums = found.setdefault(cause, _Sums())
        sums.gpus += gpus
        if is_rented:
            sums.rented_gpus += gpus
        if usd_per_hour is None:
            sums.unpriced_gpus += gpus
        elif is_rented:
            sums.rented_usd_per_hour += usd_per_hour
        else:
            sums.usd_per_hour += usd_per_hour

    newest = newest_lives(state) if lives is None else lives
    for id_, node in ((id_, node) for id_, node in state.nodes.items() if id_ in newest):
        contract = by_name.get(node.record.name)
        if node.is_lost or not node.record.gpus or node.record.name in ended_nodes:
            continue
        cause = _cause_of_node(state, id_, node, members, by_phase, goes_on=goes_on)
        if contract is None:
            add(cause, node.record.gpus, price(node.record), is_rented=False)
        else:
            del by_name[node.record.name]
            add(cause, contract.gpus, contract.usd_per_hour, is_rented=True)
    for each in by_name.values():
        gone: Cause = "lost" if each.has_joined else "booting"
        cause = "leaving" if each.is_leaving else gone
        add(cause, each.gpus, each.usd_per_hour, is_rented=True)
    loads = tuple(CauseLoad(cause, **asdict(found[cause])) for cause in sorted(found))
    step = _step_of(state, active) if active is not None and goes_on else None
    bills = renting.bill_usd, renting.bill_gpu_us
    job = None if active is None else active.job
    return UsageSample(state.now, loads, step, _cause_of_end(active), *bills, job)


def with_other_jobs(sample: UsageSample, others: Iterable[UsageSample]) -> UsageSample:
    """Add the GPUs of other jobs that share the cluster; a step of theirs is all training."""
    beside = tuple(
        OtherJobLoads(each.job or JobId(""), _all_training(each.loads)) for each in others
    )
    sums: dict[Cause, CauseLoad] = {each.cause: each for each in sample.loads}
    for load in (load for each in beside for load in each.loads):
        sums[load.cause] = _add_loads(sums.get(load.cause, CauseLoad(load.cause, 0)), load)
    return replace(sample, loads=tuple(load for _, load in sorted(sums.items())), beside=beside)


def _all_training(loads: Iterable[CauseLoad]) -> tuple[CauseLoad, ...]:
    return tuple(
        replace(load, cause="training") if load.cause == IN_STEP else load for load in loads
    )


def _add_loads(known: CauseLoad, load: CauseLoad) -> CauseLoad:
    return CauseLoad(
        known.cause,
        known.gpus + load.gpus,
        known.usd_per_hour + load.usd_per_hour,
        known.rented_usd_per_hour + load.rented_usd_per_hour,
        known.unpriced_gpus + load.unpriced_gpus,
        known.rented_gpus + load.rented_gpus,
    )


def newest_lives(state: State) -> frozenset[NodeId]:
    """Return the newest life of each node, since a machine that rebooted is paid for once."""
    newest: dict[str, Node] = {}
    for node in state.nodes.values():
        known = newest.get(node.record.name)
        if known is None or (known.is_lost, -known.since) > (node.is_lost, -node.since):
            newest[node.record.name] = node
    return frozenset(node.record.id for node in newest.values())


def _trains(active: Active, trained: tuple[str, int] | None) -> bool:
    """Whether the generation trains, also on its way to a stop."""
    record = active.generation
    if record is None or record.state == "closed":
        return False
    match active.phase:
        case Running():
            return True
        case Starting() | Stopping():
            return trained == (active.job, record.number)
        case _:
            return False


def _members(active: Active | None) -> frozenset[NodeId]:
    """Return the nodes of the generation that runs or begins; none while the job waits."""
    if active is None or isinstance(active.phase, Waiting | Held):
        return frozenset()
    if isinstance(active.phase, Opening):
        return frozenset(active.phase.record.members)
    return frozenset(() if active.generation is None else active.generation.members)


def _cause_of_phase(state: State, *, goes_on: bool) -> Cause:
    """Return the cause of the job's nodes, unless a node's own report is more precise."""
    active = state.active
    if active is None:
        is_paused = any(job.state == "paused" for job in state.jobs.values())
        return "paused" if is_paused else "no_job"
    if goes_on:
        return IN_STEP
    match active.phase:
        case Held():
            return "held"
        case Waiting():
            return _while_waiting(state, active)
        case Stopping() | Opening() | Closing():
            return "moving_quiesce"
        case _:
            return "moving_fetch"


def _while_waiting(state: State, active: Active) -> Cause:
    if active.question is not None:
        return "moving_plan"
    if state.now < active.attempts.not_before:
        return "recovering"
    there = usable(state, active)
    is_refused = active.asked.is_refused and active.asked.nodes == frozenset(there)
    if is_refused and active.asked.is_unpaid and not state.options.rents:
        return "held"  # More nodes at these prices do not help: the limit must be raised.
    return "waiting_for_capacity" if is_refused or not there else "moving_detect"


def _cause_of_node(
    state: State,
    id_: NodeId,
    node: Node,
    members: frozenset[NodeId],
    by_phase: Cause,
    *,
    goes_on: bool,
) -> Cause:
    active, report = state.active, node.report
    if id_ in members and active is not None:
        if goes_on:
            is_parked = (
                isinstance(active.phase, Stopping) and _find_taking(active, report) == "stopped"
            )
            return "moving_quiesce" if is_parked else IN_STEP
        if isinstance(active.phase, Starting):
            return _BY_TAKING[_find_taking(active, report)]
        return by_phase
    if node.absent_since is not None:
        return "lost"
    if node.exclusion.draining_since is not None:
        return "leaving"
    is_preparing = report is not None and report.unfit == PREPARING
    if node.record.state == "joining" or report is None or is_preparing:
        return "booting"
    if active is None or isinstance(active.phase, Held):
        return by_phase
    if node.exclusion.slow:
        return "slow_node"
    if isinstance(active.phase, Waiting) and not node.why_unusable:
        return by_phase
    return "unused"


def _find_taking(active: Active, report: Report | None) -> str:
    record = active.generation
    if report is None or record is None or not report.speaks_of(record):
        return "idle"
    return report.taking


def _step_of(state: State, active: Active) -> StepProgress:
    record = active.generation
    assert record is not None
    reports = [report for _, report in state.reports_of(record)]
    stalls = [r.stall_s for r in reports if r.stall_s is not None]
    # All ranks wait for the slowest; a step without a snapshot is not stalled.
    stall_s = max(stalls, default=0.0) / max(record.memory_every, 1)
    first = record.restore.point.step
    busy_s, slow_s = _compute(active, record, reports)
    return StepProgress(
        active.job,
        record.number,
        max(active.progress.step, first),
        first,
        record.step_s or active.progress.step_s or 0.0,
        busy_s,
        stall_s,
        slow_s,
    )


def _compute(
    active: Active, record: GenerationRecord, reports: list[Report]
) -> tuple[float | None, float]:
    """Return the sum of compute time per step over ranks, and how long a straggler delays all."""
    if record.busy is None or not record.busy.seconds:
        return None, 0.0
    seconds = list(record.busy.seconds)
    slow_s = 0.0
    for report in reports:
        straggler = active.slowness.speeds.slow.get(report.node)
        for rank, measured in report.busy:
            if rank >= len(seconds):
                continue
            seconds[rank] = measured
            if straggler is not None and straggler.times > 1:
                seconds[rank] = measured / straggler.times
                slow_s = max(slow_s, measured - seconds[rank])
    return sum(seconds), slow_s


def _cause_of_end(active: Active | None) -> Cause:
    """Return the cause for a step that never ended: stopped on order, or lost."""
    if active is None or isinstance(active.phase, Opening | Closing | Starting):
        return "moving_quiesce"
    return "moving_detect"
