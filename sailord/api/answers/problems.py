"""What may need a person, a sentence each, and since when: for ``doctor``, ``status``, the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agents.protocol.codec import plain
from sailord.api.answers.node_types import NodeView
from sailord.api.answers.types import (
    ActiveView,
    CapacityGlance,
    PausedJob,
    Refusals,
    StoreView,
)
from sailord.core.model.nodes import LostNode
from sailord.core.queries.forecast import DEADLINE
from sailord.core.rules.job_rules import why_yielded
from sailord.notify.feed import EventKind
from sailord.text.cluster_text import cure_of_hold, refused_line

REFUSALS_MANY = 10
"""Refused requests within an hour that are reported; fewer may be typing errors."""
CURES = {
    "suspect": "its lease has ended: unless its agent is heard soon it counts as lost; "
    "see whether it is up and reaches the store",
    "lost": "if it is up, start its sailor-agent; journalctl -u sailor-agent there says why it "
    "ended",
}
"""Of a node's state."""
LISTED = "listed until it or another one of its kind joins, for a day at most"
WRITES = "make room in it, or give sailord its rights (docs/operations.md)"
RECEIVER = "see that it runs, and its address in sailord.toml"
UNREADABLE = "docs/operations.md#troubleshooting says what to do"
LATE = "it needs faster or more instances: allow more pools, or raise the budgets"
FASTER = "it needs faster or more nodes"
TOTAL_BUDGET = "objective.max_usd_total"
"""The place that the planner names if the budget pays for no plan."""
STORAGE = "mend the storage: it is tried again by itself"
TROUBLE = "journalctl -u sailor-agent there says more"
UNANSWERED_MANY = 2
"""Questions in a row without an answer by the planner that are reported; one may be bad luck."""
PLANNER = (
    "look at the load of the leader's host, where the planner runs: give sailord more of its "
    "processors and memory; journalctl -u sailord there says more"
)
SLOW = "look at its heat and load; sailorctl drain {name} moves the job off it"
SLOW_LEFT_OUT = "it is left out; once it is mended, sailorctl uncordon {name} lets plans use it"
SLOW_JOB = "sailorctl timeline shows where its steps wait"
NO_NODE = "there is no node; start sailor-agent on one"
OVERDUE_S = 60.0
"""Report a node that is still up this long after its notice ran out."""
SETTLED_S = 30.0
"""For this long after an election the leader may see for the first time what stood before it."""


@dataclass(frozen=True, slots=True)
class OpenProblem:
    """What may need a person."""

    kind: str
    subject: str
    """Which job, node, record or receiver; empty: the cluster."""
    text: str
    """It may change while the problem stands."""
    since: float | None = None
    """Since when it stands, where the state knows that; ``None``: since it was first seen."""


@dataclass(eq=False)
class FirstSeen:
    """When the leader first saw each problem that stands, by its kind and subject.

    A new leader does not know when a problem began that it finds: it counts from the election.
    """

    _at: dict[tuple[str, str], float] = field(default_factory=dict)
    _led_since: float | None = None

    def since(self, problem: OpenProblem, led_since: float | None, now: float) -> float:
        """Return since when a problem stands that is seen now; ``led_since``: the election."""
        if led_since != self._led_since:
            self._at, self._led_since = {}, led_since
        is_settled = led_since is None or now >= led_since + SETTLED_S
        first = now if is_settled or led_since is None else led_since
        seen = self._at.setdefault((problem.kind, problem.subject), first)
        return seen if problem.since is None else problem.since

    def keep_only(self, problems: Iterable[OpenProblem]) -> None:
        """Forget the problems that no longer stand."""
        stand = {(each.kind, each.subject) for each in problems}
        self._at = {key: at for key, at in self._at.items() if key in stand}


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
    lost: tuple[LostNode, ...] = ()
    """Nodes that were lost and not replaced."""


def problems_of(
    service: Service,
    job: ActiveView | None,
    nodes: Iterable[NodeView],
    now: float,
    paused: Iterable[PausedJob] = (),
    risks: Mapping[EventKind, str] = MappingProxyType({}),
    stuck: Mapping[str, str] = MappingProxyType({}),
) -> tuple[OpenProblem, ...]:
    """Return all problems, those of the service first.

    ``risks``: to the job's budget and deadline, by the kind of event. ``stuck``: nodes whose drain
    cannot end, and why.
    """
    views = tuple(nodes)
    jobs = (*_job_problems(job, views, risks), *_list_held_jobs(paused))
    kept = [
        OpenProblem("stuck", name, f"{name} cannot drain: {why}") for name, why in stuck.items()
    ]
    of_nodes = (
        *_twins(views),
        *_node_problems(views, now),
        *_list_lost_before(service.lost, views),
    )
    if not views:
        rented = "there is no node yet; sailorctl capacity shows which instances are rented"
        of_nodes = (OpenProblem("no node", "", NO_NODE if service.capacity is None else rented),)
    return (*_service_problems(service), *jobs, *kept, *of_nodes)


def _list_held_jobs(paused: Iterable[PausedJob]) -> Iterator[OpenProblem]:
    """Yield the jobs that were held and gave the cluster to the next one, or train beside it."""
    for job in paused:
        if job.state == "held":
            cure = cure_of_hold(job.id, {"unpaid": job.unpaid}, job.reason)
            text = f"{job.id} is held: {job.reason}; {cure}"
            yield OpenProblem("held", job.id, text, job.held_at)
        elif why := why_yielded(job.reason):
            cure = cure_of_hold(job.id, {"unpaid": job.unpaid}, job.reason)
            text = f"{job.id} was held ({why}) and has not been resumed; {cure}"
            yield OpenProblem("held", job.id, text, job.held_at)


def _service_problems(service: Service) -> Iterator[OpenProblem]:
    store = service.store
    if not store.answers:
        trouble = f" ({store.trouble})" if store.trouble else ""
        cure = "check that it runs and that the leader reaches it"
        text = f"the store does not answer{trouble}; {cure}"
        yield OpenProblem("store", "", text, store.away_since)
    elif store.trouble:
        text = f"the store rejects writes and blocks the controller: {store.trouble}; {WRITES}"
        yield OpenProblem("writes", "", text)
    if not service.has_leader:
        yield OpenProblem("leader", "", "no leader is elected; read the log of each sailord")
    for each in service.unheard:
        text = f"webhook receiver does not answer: {each}; {RECEIVER}"
        yield OpenProblem("receiver", each.partition(": ")[0], text)
    for key, why in service.unreadable.items():
        yield OpenProblem("unreadable", key, f"cannot be read: {key}: {why}; {UNREADABLE}")
    if service.refusals.last_hour >= REFUSALS_MANY:
        refused = refused_line({"refusals": plain(service.refusals)})
        text = f"refused: {refused}; see sailor_requests_refused_total, and docs/security.md"
        yield OpenProblem("refusals", "", text)
    if service.capacity is not None:
        yield from capacity_problems(service.capacity)


def capacity_problems(glance: CapacityGlance) -> Iterator[OpenProblem]:
    """Yield what is wrong with rented instances."""
    for name in glance.orphans:
        text = f"{name} could not be deleted and is still billed; delete it by hand"
        yield OpenProblem("orphan", name, text)
    if glance.stop:
        text = "the capacity budget is spent; raise [capacity] usd_max and restart sailord"
        yield OpenProblem("capacity budget", "", text)
    for pool in glance.stopped:
        yield OpenProblem("stopped", pool.partition(": ")[0], f"nothing is rented of {pool}")
    if glance.why_not_rented:
        text = f"no instance is wanted, since there is no plan: {glance.why_not_rented}"
        yield OpenProblem("not rented", "", text)
    if glance.is_late:
        yield OpenProblem("late", "", f"{glance.deadline}; {LATE}")
    if glance.resting and glance.up < glance.wanted:
        text = "instances are missing, requests were refused; see sailorctl capacity"
        yield OpenProblem("missing", "", text)


def _job_problems(
    job: ActiveView | None, nodes: Sequence[NodeView], risks: Mapping[EventKind, str]
) -> Iterator[OpenProblem]:
    if job is None:
        return
    if job.state == "held":
        reason = job.phase.reason
        text = f"{job.id} is held: {reason}; {cure_of_hold(job.id, plain(job.spent), reason)}"
        yield OpenProblem("held", job.id, text, job.phase.since)
    elif job.phase.name == "waiting":
        is_short = job.phase.has_no_node or job.phase.has_no_plan
        cures = _cures_of_wait(nodes) if is_short else []
        if TOTAL_BUDGET in (job.phase.reason or ""):
            cures.insert(0, f"sailorctl budget {job.id} USD raises it")
        if job.phase.has_no_node and not cures:
            cures = ["mend its cause, or add nodes"]
        text = "; ".join([f"{job.id} waits: {job.phase.reason}", *cures])
        yield OpenProblem("waits", job.id, text, job.phase.since)
    if job.storage_trouble:
        yield OpenProblem("storage", job.id, f"checkpoints: {job.storage_trouble}; {STORAGE}")
    if job.unanswered >= UNANSWERED_MANY:
        text = f"the planner did not answer {job.unanswered} times in a row about {job.id}"
        yield OpenProblem("planner", job.id, f"{text}; {PLANNER}")
    if job.slow is not None:
        text = f"{job.id} is slow: {job.slow.text}; {SLOW_JOB}"
        yield OpenProblem("slow", job.id, text, job.slow.at)
    for kind, risk in risks.items():
        cure = f"; {FASTER}" if kind == DEADLINE else ""  # The budget's is in the sentence.
        yield OpenProblem(kind, job.id, f"{job.id}: {risk}{cure}")


def _cures_of_wait(nodes: Sequence[NodeView]) -> list[str]:
    """Return which order would make a node usable, by what keeps nodes out.

    Not of nodes with wrong bits, nor of those that end or go to another job.
    """
    cordoned = [n.name for n in nodes if n.state == "cordoned" and not n.unsound]
    drained = [n for n in nodes if n.state == "draining" and n.drained_why]
    staying = [n.name for n in drained if n.leaves_at is None]
    uncordon = [f"sailorctl uncordon {name} lets plans use it again" for name in cordoned[:1]]
    withdraw = [f"sailorctl withdraw {name} lets plans use it again" for name in staying[:1]]
    return uncordon + withdraw


def _twins(nodes: Iterable[NodeView]) -> Iterator[OpenProblem]:
    """Yield names that several machines have: an order is for the one that joined last."""
    places: dict[str, set[str]] = {}
    for node in nodes:
        if node.address and node.state not in ("suspect", "lost"):
            places.setdefault(node.name, set()).add(node.address)
    for name, found in places.items():
        if len(found) > 1:
            where = ", ".join(sorted(found))
            text = f"several machines have the name {name} ({where}); set name in their agent.toml"
            yield OpenProblem("twins", name, text)


def _list_lost_before(lost: Iterable[LostNode], nodes: Iterable[NodeView]) -> Iterator[OpenProblem]:
    """Yield the lost nodes whose records are gone, since a move does not bring them back."""
    listed = {node.id for node in nodes if node.state == "lost"}
    for node in lost:
        if node.id not in listed:
            text = f"{node.name} was lost: {node.why}; {CURES['lost']}; {LISTED}"
            yield OpenProblem("gone", node.id, text, node.at)


def _node_problems(nodes: Iterable[NodeView], now: float) -> Iterator[OpenProblem]:
    for node in nodes:
        is_gone = node.state in ("suspect", "lost")
        if is_gone and node.spot:
            continue  # As expected of spot nodes.
        if is_gone or node.failure:
            why = node.failure or node.why_lost
            cure = CURES.get(node.state, f"sailorctl logs {node.name} shows more")
            text = f"{node.name} is {node.state}{f': {why}' if why else ''}; {cure}"
            yield OpenProblem("gone" if is_gone else "failure", node.id, text)
        if node.unsound:
            setup = f"; sailorctl logs {node.name} --setup shows what it printed"
            text = f"{node.name} is not used: {node.unsound}{setup * ('setup `' in node.unsound)}"
            yield OpenProblem("unsound", node.id, text)
        if node.state == "lost":
            continue
        if node.slow:
            cure = (SLOW_LEFT_OUT if node.slow_since is None else SLOW).format(name=node.name)
            text = f"{node.name} is slow: {node.slow}; {cure}"
            yield OpenProblem("slow", node.id, text, node.slow_since)
        if node.trouble:
            yield OpenProblem("trouble", node.id, f"{node.name}: {node.trouble}; {TROUBLE}")
        if node.leaves_at is not None and now - node.leaves_at > OVERDUE_S:
            text = (
                f"{node.name} is still up after its notice ran out; "
                f"sailorctl withdraw {node.name} lets plans use it again"
            )
            yield OpenProblem("overdue", node.id, text, node.leaves_at)
