"""Converts between the cluster's state, the capacity decisions and the planner's questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from agents.protocol.records import NodeId, name_in
from planner.move_policy.deadline import expected_spot_share
from sailord.capacity.core.deadline_model import Choice, DeadlineOptions, JobProgress
from sailord.capacity.core.model import Agent, CapacityState
from sailord.capacity.core.supply import obtainable, queued_supply, supply
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held, Opening, Running, Starting, Stopping
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import State
from sailord.core.queries.drain_status import holders
from sailord.core.queries.job_cost import billed, is_billed, priced
from sailord.core.queries.leave_times import left_later
from sailord.planning.messages import DeadlineChoices, MachineChoice, PoolSupply, WorkLeft
from sailord.providers.interface import Pool

REPLACED_S = 600.0
"""Another node is requested this long before the job leaves an announced one, as after a slow
boot."""


def agents_of(state: State) -> tuple[Mapping[str, Agent], frozenset[str]]:
    """Return live agents by node name, and the names of the nodes that the job uses.

    A member without a lease trains on if only the store is out of its reach, until it is given up.
    One whose end is announced is leaving once another one has to be requested for it.
    """
    active = state.active
    later = {} if active is None else left_later(state, active)
    agents = {
        _name(node): Agent(
            node.record.gpus if node.record.machine else None,
            (node.is_draining or node.record.leaves_at is not None)
            and later.get(id_, state.now) <= state.now + REPLACED_S,
            bool(node.exclusion.wrong_bits),
        )
        for id_, node in state.nodes.items()
        if not node.is_lost
    }
    if state.unreadable:
        return agents, frozenset(agents)  # A job that cannot be read may use any of them.
    if active is None:
        return agents, frozenset()
    members: set[NodeId] = set()
    if active.generation is not None and active.generation.state != "closed":
        members.update(active.generation.members)
    match active.phase:
        case Opening(proposal=proposal) | Stopping(then=Proposal() as proposal):
            members.update(proposal.members)
        case _:
            pass
    return agents, _names(state, members)


def holding(state: State) -> frozenset[str]:
    """Return the names of the nodes whose memory the job may need, whether it uses them or not."""
    return _names(state, holders(state))


def _names(state: State, ids: Iterable[NodeId]) -> frozenset[str]:
    return frozenset(_name(state.nodes[id_]) for id_ in ids if id_ in state.nodes)


def _name(node: Node) -> str:
    """Return its name; of a member whose record went before we led, only its id is known."""
    return node.record.name if node.record.machine else name_in(node.record.id)


def progress_of(state: State) -> JobProgress | None:
    """Return how far the active job is; ``None``: none is active, or it is held."""
    active = state.active
    if active is None or isinstance(active.phase, Held):
        return None
    job, ran, step = state.job, active.generation, active.progress.step
    predicted_s = 0.0 if ran is None else ran.predicted_s or ran.step_s
    step_s = active.progress.step_s or predicted_s
    durable = state.durables.get(job.id)
    is_saved = job.saving.uri is not None
    since = max(step - (0 if durable is None else durable.point.step), 0) if is_saved else 0
    bill = billed(job, priced(state, ran), state.now)
    return JobProgress(
        job.id,
        job.submitted_at,
        max(step - job.begun, 0),
        None if job.steps is None else max(job.steps - job.begun, 1),
        job.deadline,
        is_running=isinstance(active.phase, Running),
        starting_since=active.phase.since if isinstance(active.phase, Starting) else None,
        slower=step_s / predicted_s if predicted_s else 1.0,
        redo_s=since * step_s,
        usd_left=None if bill.usd_max is None else bill.usd_max - bill.usd,
        usd_per_hour=(ran.usd_per_hour or 0.0) if is_billed(ran) and ran is not None else 0.0,
    )


def work_left(capacity: CapacityState, job: JobProgress | None) -> WorkLeft | None:
    """Return what is left of a job with a deadline; ``None``: no such job is active."""
    if job is None or job.steps is None or job.deadline is None:
        return None
    pace, now_s = capacity.pace, capacity.now - job.begun_at
    spot_s = pace.spot_s if pace is not None and pace.job == job.job else 0.0
    left_s = max(job.deadline - capacity.now, 0.0) / job.slower
    return WorkLeft(job.steps - job.step, left_s, expected_spot_share(spot_s, max(now_s, 0.0)))


def options_of(
    job: str, offered: Sequence[Pool], pools: Sequence[PoolSupply], choices: DeadlineChoices
) -> DeadlineOptions:
    """Return what a job with a deadline could run on, as targets."""

    def choice(found: MachineChoice | None) -> Choice | None:
        if found is None:
            return None
        target = target_of(offered, pools, found.counts)
        return Choice(target, found.step_s, found.usd_per_hour)

    return DeadlineOptions(
        job,
        target_of(offered, pools, choices.spot),
        choice(choices.spot_now),
        choice(choices.on_demand),
        choice(choices.fastest),
        choices.why_not,
        choices.is_spot_dear,
    )


def pool_supplies(
    capacity: CapacityState, offered: Sequence[Pool], state: State
) -> tuple[PoolSupply, ...]:
    """Return each pool's supply: up or requested, available, and nodes that are not rented.

    What waits in the provider's queue is available, as the job must do without it for hours.
    """
    there, queued = supply(capacity), queued_supply(capacity)
    rented = {each.instance.node: each.instance.pool for each in capacity.instances.values()}
    others, ready = Counter[Pool](), Counter[Pool]()
    for node in state.nodes.values():
        record = node.record
        is_useful = not node.is_lost and not node.is_draining and not node.is_closed_to_new_plans
        if not is_useful or node.exclusion.wrong_bits or not record.gpus:
            continue
        pool = Pool(record.zone, record.machine, record.gpu, record.gpus, record.spot)
        if record.name in rented:  # An agent does not know of the queue it came from.
            pool = replace(pool, flex=rented[record.name].flex)
        ready[pool] += node.absent_since is None and record.leaves_at is None
        if record.name not in rented:
            others[pool] += 1
    pools = sorted({*offered, *there, *others})
    return tuple(
        PoolSupply(
            **asdict(pool),
            up=there[pool] - queued[pool] + others[pool],
            obtainable=queued[pool] + (obtainable(capacity, pool, there) if pool in offered else 0),
            usd_per_hour=capacity.prices.get(pool),
            unrented=others[pool],
            ready=min(ready[pool], there[pool] - queued[pool] + others[pool]),
        )
        for pool in pools
        if there[pool] + others[pool] or pool in offered
    )


def without_market(pools: Iterable[PoolSupply]) -> list[PoolSupply]:
    """Return what is up or requested, without what is available."""
    return [replace(pool, obtainable=0, usd_per_hour=None, ready=0) for pool in pools]


def possible_supplies(capacity: CapacityState, offered: Sequence[Pool]) -> tuple[PoolSupply, ...]:
    """Return how many instances of each pool there could ever be, whatever is refused now."""
    most, quotas = capacity.policy.machines_per_pool_max, capacity.quotas or ()
    limits = [(q.limit_gpus, q.pools) for q in quotas if q.limit_gpus is not None]
    return tuple(
        PoolSupply(
            **asdict(pool),
            up=0,
            obtainable=min(
                [most, *(int(gpus) // pool.gpus for gpus, pools in limits if pool in pools)]
            ),
            usd_per_hour=capacity.prices.get(pool),
        )
        for pool in sorted(offered)
    )


def target_of(
    offered: Sequence[Pool], pools: Sequence[PoolSupply], counts: Sequence[int]
) -> dict[Pool, int]:
    """Return the planner's answer as a target, restricted to pools of the provider."""
    found = {}
    for wanted, count in zip(pools, counts, strict=True):
        pool = Pool(wanted.zone, wanted.machine, wanted.gpu, wanted.gpus, wanted.spot, wanted.flex)
        if pool in offered:
            found[pool] = max(count - wanted.unrented, 0)
    return found
