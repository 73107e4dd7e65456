"""What may need a person, one sentence each: for ``doctor``, ``status`` and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agents.protocol.codec import plain
from sailord.api.answers.types import (
    ActiveView,
    CapacityGlance,
    NodeView,
    PausedJob,
    Refusals,
    StoreView,
)
from sailord.core.rules.job_rules import why_yielded
from sailord.text.cluster_text import cure_of_hold, refused_line
from sailord.text.cures import SPEND_MORE
from sailord.text.units import duration

REFUSALS_MANY = 10
"""Refused requests within an hour that are reported; fewer may be typing errors."""
CURES = {
    "suspect": "its lease has ended: unless its agent is heard soon it counts as lost; "
    "see whether it is up and reaches the store",
    "lost": "if it is up, read the log of its sailor-agent and start it again",
}
"""Of a node's state."""
NO_NODE = "there is no node; start sailor-agent on one"
OVERDUE_S = 60.0
"""Report a node that is still up this long after its notice ran out."""


@dataclass(frozen=True, slots=True)
class Service:
    """How sailord itself fares, apart from job and nodes."""

    has_leader: bool
    store: StoreView
    unheard: tuple[str, ...]
    """Webhook receivers that do not accept messages, and why."""
    unreadable: Mapping[str, str]
    refusals: Refusals
    capacity: CapacityGlance | None


def problems_of(
    service: Service,
    job: ActiveView | None,
    nodes: Iterable[NodeView],
    now: float,
    paused: Iterable[PausedJob] = (),
    risks: Iterable[str] = (),
    stuck: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return all problems, those of the service first.

    ``risks``: to the job's budget and deadline. ``stuck``: nodes whose drain cannot end, and why.
    """
    views = tuple(nodes)
    jobs = (*_job_problems(job, views, risks), *_yielded(paused))
    kept = [f"{name} cannot drain: {why}" for name, why in stuck.items()]
    of_nodes = (*_twins(views), *_node_problems(views, now))
    if not views:
        rented = "there is no node yet; sailorctl capacity shows which instances are rented"
        of_nodes = (NO_NODE if service.capacity is None else rented,)
    return (*_service_problems(service), *jobs, *kept, *of_nodes)


def _yielded(paused: Iterable[PausedJob]) -> Iterator[str]:
    """Yield the jobs that were held and gave the cluster to the next one, or train beside it."""
    for job in paused:
        if job.state == "held":
            cure = cure_of_hold(job.id, {"unpaid": job.unpaid})
            yield f"{job.id} is held: {job.reason}; {cure}"
        elif why := why_yielded(job.reason):
            cure = SPEND_MORE if job.unpaid else f"mend that, then sailorctl resume {job.id}"
            yield f"{job.id} was held ({why}) and has not been resumed; {cure}"


def _service_problems(service: Service) -> Iterator[str]:
    store = service.store
    if not store.answers:
        trouble = f" ({store.trouble})" if store.trouble else ""
        cure = "check that it runs and that the leader reaches it"
        yield f"the store does not answer{trouble}; {cure}"
    elif store.trouble:
        yield f"the store rejects writes and blocks the controller: {store.trouble}"
    if not service.has_leader:
        yield "no leader is elected; read the log of each sailord"
    yield from (f"webhook receiver does not answer: {each}" for each in service.unheard)
    yield from (f"cannot be read: {key}: {why}" for key, why in service.unreadable.items())
    if service.refusals.last_hour >= REFUSALS_MANY:
        refused = refused_line({"refusals": plain(service.refusals)})
        yield f"refused: {refused}; see sailor_requests_refused_total, and docs/security.md"
    if service.capacity is not None:
        yield from capacity_problems(service.capacity)


def capacity_problems(glance: CapacityGlance) -> Iterator[str]:
    """Yield what is wrong with rented instances."""
    for name in glance.orphans:
        yield f"{name} could not be deleted and is still billed; delete it by hand"
    if glance.stop:
        yield "the capacity budget is spent; raise [capacity] usd_max and restart sailord"
    yield from (f"nothing is rented of {pool}" for pool in glance.stopped)
    if glance.why_not_rented:
        yield f"no instance is wanted, since there is no plan: {glance.why_not_rented}"
    if glance.is_late:
        yield glance.deadline
    if glance.resting and glance.up < glance.wanted:
        yield "instances are missing, requests were refused; see sailorctl capacity"


def _job_problems(
    job: ActiveView | None, nodes: Sequence[NodeView], risks: Iterable[str]
) -> Iterator[str]:
    if job is None:
        return
    if job.state == "held":
        cure = cure_of_hold(job.id, plain(job.spent))
        yield f"{job.id} is held: {job.phase.reason}; {cure}"
    elif job.phase.name == "waiting":
        cures = _cures_of_wait(nodes) if job.phase.has_no_node else []
        yield "; ".join([f"{job.id} waits: {job.phase.reason}", *cures])
    if job.storage_trouble:
        yield f"checkpoints: {job.storage_trouble}"
    yield from (f"{job.id}: {risk}" for risk in risks)


def _cures_of_wait(nodes: Sequence[NodeView]) -> list[str]:
    """Return what would make a node usable, by what keeps nodes out."""
    cures = {
        "sailorctl uncordon {name} lets plans use it again": "cordoned",
        "sailorctl withdraw {name} cancels its drain": "draining",
    }
    named = ((cure, [n.name for n in nodes if n.state == state]) for cure, state in cures.items())
    found = [cure.format(name=names[0]) for cure, names in named if names]
    return found or ["mend its cause, or add nodes"]


def _twins(nodes: Iterable[NodeView]) -> Iterator[str]:
    """Yield names that several machines have: an order is for the one that joined last."""
    places: dict[str, set[str]] = {}
    for node in nodes:
        if node.address and node.state not in ("suspect", "lost"):
            places.setdefault(node.name, set()).add(node.address)
    for name, found in places.items():
        if len(found) > 1:
            where = ", ".join(sorted(found))
            yield f"several machines have the name {name} ({where}); set name in their agent.toml"


def _node_problems(nodes: Iterable[NodeView], now: float) -> Iterator[str]:
    for node in nodes:
        is_gone = node.state in ("suspect", "lost")
        if is_gone and node.spot:
            continue  # As expected of spot nodes.
        if is_gone or node.failure:
            why = node.failure or node.why_lost
            cure = f"; {CURES[node.state]}" if node.state in CURES else ""
            yield f"{node.name} is {node.state}{f': {why}' if why else ''}{cure}"
        if node.unsound:
            yield f"{node.name} is not used: {node.unsound}"
        if node.state == "lost":
            continue
        if node.trouble:
            yield f"{node.name}: {node.trouble}"
        overdue_s = 0.0 if node.leaves_at is None else now - node.leaves_at
        if overdue_s > OVERDUE_S:
            yield (
                f"{node.name} is still up {duration(overdue_s)} after its notice ran out; "
                f"sailorctl withdraw {node.name} lets plans use it again"
            )
