"""A sailord that rents from the fake Google Cloud on a virtual clock, in one thread.

The capacity loop, the provider and Google's client library are real; the network between them and
the fake cloud is a function call that takes virtual time, arrives late, or loses its answer. Store
and planner are fakes.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from agents.protocol.records import (
    FIRST,
    Fence,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeRecord,
    Order,
    Report,
)
from sailord.capacity.core.budget import spent_usd
from sailord.capacity.core.model import CapacityPolicy, PendingRequest
from sailord.capacity.loop import CapacityLoop
from sailord.core.model.nodes import Exclusion, Node, Nodes
from sailord.core.model.state import State
from sailord.planning.messages import (
    NO_CONTEXT,
    CapacityAnswer,
    CapacityRequest,
    MoveContext,
    PoolSupply,
)
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.provider import GceProvider
from sailord.providers.gce.requests import REQUEST_LABEL, request_uuid
from sailord.providers.interface import Pool
from simulator.hardware.catalogue import load_catalogue
from tests.fakes.gce.cloud import Cloud, Group, Hooks, InjectedFailure, Offer, Vm
from tests.fakes.gce.rest import Rest
from tests.gce.virtual_client import Gateway, VirtualClient

ZONES = {"us-central1-a": "us-central1", "us-central1-b": "us-central1", "us-east1-b": "us-east1"}
MACHINES = {"a2-highgpu-1g": 1, "a2-highgpu-2g": 2}
CATALOGUE = load_catalogue()
POOLS = tuple(
    Pool(zone, machine, "A100-40", gpus, spot)
    for zone in ZONES
    for machine, gpus in MACHINES.items()
    for spot in (True, False)
)
GROUPED = POOLS[0]
METRICS = ("NVIDIA_A100_GPUS", "PREEMPTIBLE_NVIDIA_A100_GPUS")
KINDS = (
    *("stock", "stock", "quota", "storm", "preempt", "preempt", "preempt", "die", "hang", "dead"),
    *("blind", "zone", "denied", "expired", "kill", "store", "odd", "wish", "wish", "lost"),
)
"""Events that may happen at any second."""
JOB = JobId("tale")
BEGIN = 1_700_000_000.0
UNANSWERED = "it was never answered"
CALL_S = 10.0
"""For so long a call waits for an answer."""
STORM_S = 30.0
"""Longest time without an answer of Google; a total budget keeps a reserve for it."""


@dataclass(eq=False)
class Head:
    """One sailord, from its start to its end."""

    capacity: CapacityLoop
    task: asyncio.Task[None]


@dataclass(eq=False)
class SeenCluster:
    """The capacity loop's view of the controller."""

    state: State
    world: World
    move_context: MoveContext = NO_CONTEXT

    @property
    def is_store_available(self) -> bool:
        return self.world.now() >= self.world._store_back_at


@dataclass(eq=False)
class World(Hooks):
    """One script: a faulty cloud, and the current leader."""

    seed: int
    policy: CapacityPolicy
    calm: bool = False
    wish: Counter[Pool] = field(default_factory=Counter)
    overspent: float = 0.0
    too_dear_s: float = 0.0
    """Longest continuous time above the hourly budget."""
    errors: list[str] = field(default_factory=list)
    head: Head | None = None
    _nodes: dict[str, Node] = field(default_factory=dict)
    _store_back_at: float = 0.0
    _works: bool = True
    _dear_since: float | None = None
    _known: set[str] = field(default_factory=set)
    """Numbers of all instances that sailord has ever observed."""
    _open: dict[str, PendingRequest] = field(default_factory=dict)
    """Sailord's open requests one second ago, ..."""
    _unanswered: dict[Pool, float] = field(default_factory=dict)
    """... and the start of cooldowns of pools for requests without an answer."""

    def __post_init__(self) -> None:
        self.random, self._ids = random.Random(self.seed), random.Random(self.seed)
        self.cloud = Cloud(
            project="test-project",
            hooks=self,
            clock=self.now,
            zones=ZONES,
            offers={machine: _offer(machine, gpus) for machine, gpus in MACHINES.items()},
            operation_s=3.0,
            boot_s=20.0,
            remembers_s=20.0,
            page=self.random.choice((2, 7, 500)),
            warns=self.random.random() < 0.5,
        )
        groups = self.random.random() < 0.3
        if groups:
            template = {
                "machineType": GROUPED.machine,
                "labels": {"sailor-cluster": "test"},
                "scheduling": {
                    "provisioningModel": "SPOT",
                    "instanceTerminationAction": "DELETE",
                },
                "disks": [{"boot": True, "autoDelete": True}],
            }
            self.cloud.groups["pool"] = Group("pool", GROUPED.zone, template)
        self._config = GceConfig(
            project="test-project",
            cluster_name="test",
            pools=POOLS,
            groups={GROUPED: "pool"} if groups else {},
            call_s=CALL_S,
            operation_s=30.0,
            poll_s=2.0,
        )
        self._rest = Rest(self.cloud)
        self._gateway = Gateway(lambda: self.now() < self._store_back_at, self._follow_order)
        for pool in POOLS:
            self._restock(pool)
        for region in sorted(set(ZONES.values())):
            self._change_quota(region)

    def now(self) -> float:
        return BEGIN + asyncio.get_running_loop().time()

    # ---- the script ---------------------------------------------------------------------------

    async def live(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Advance the clock with random events, at most until the condition holds."""
        end, loop = self.now() + seconds, asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: self.errors.append(str(about)))
        if self.head is None:
            self._lead()
        while self.now() < end and not until():
            await asyncio.sleep(1.0)
            self.cloud.advance()
            for group in self.cloud.groups.values():
                self.cloud.fill(group)
            self._check_money()
            self._check_asks()
            assert self.head is not None
            assert not self.head.task.done(), f"sailord ended by itself: {self.head.task!r}"
            if not self.calm and self.random.random() < 0.05:
                await self._fail_at_random()

    def settle(self) -> None:
        """End all failures and shortages."""
        self.calm = True
        self.cloud.stock.clear()
        self.cloud.quotas.clear()
        self.cloud.unreachable.clear()
        self.cloud.failures.clear()
        self.cloud.denied.clear()
        self.cloud.is_expired = False
        self.cloud.hung = self.cloud.dead = self.cloud.blind = 0
        self._store_back_at = 0.0
        if self.head is not None:
            self.head.capacity.retry_boots()

    async def end(self) -> None:
        """Stop sailord."""
        await self._kill()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _fail_at_random(self) -> None:
        """Cause a random event."""
        cloud, chance = self.cloud, self.random
        kind = chance.choice(KINDS)
        spot = [vm for vm in cloud.there() if vm.spot and vm.status == "RUNNING"]
        if kind == "stock":
            self._restock(chance.choice(POOLS))
        elif kind == "quota":
            self._change_quota(chance.choice(list(ZONES.values())))
        elif kind == "storm":
            self._for_a_while(
                InjectedFailure(".*", 10**6, status=503, is_done=chance.random() < 0.5)
            )
        elif kind == "preempt" and spot:
            cloud.preempt(chance.choice(spot).name, notice_s=chance.choice((0.0, 30.0)))
        elif kind == "die" and cloud.there():
            cloud.kill(chance.choice(cloud.there()).name)
        elif kind in ("hang", "dead", "blind"):
            name = {"hang": "hung"}.get(kind, kind)
            setattr(cloud, name, chance.choice((1, 2)))
        elif kind == "zone":
            self._later(cloud.unreachable.clear)
            cloud.unreachable.add(chance.choice(list(ZONES)))
        elif kind == "denied":
            self._later(cloud.denied.clear)
            cloud.denied.add(chance.choice(("compute.instances.create", "compute.instances.list")))
        elif kind == "expired":
            self._later(lambda: setattr(cloud, "is_expired", False))
            cloud.is_expired = True
        elif kind == "store":
            self._store_back_at = self.now() + chance.uniform(0, STORM_S)
        elif kind == "odd":
            status, reason = chance.choice(((429, "rateLimitExceeded"), (418, "FLUX"), (500, "x")))
            self._for_a_while(InjectedFailure("POST|DELETE", 3, status, reason, retry_after_s=5))
        elif kind == "lost":
            self._for_a_while(InjectedFailure("bulkInsert|createInstances", 1, 503, is_done=True))
        elif kind == "wish":
            self._change_target()
        elif kind == "kill":
            await self._kill()
            await asyncio.sleep(chance.uniform(0, 15))
            self._lead()

    def _later(self, act: Callable[[], None]) -> None:
        self.cloud.after(self.random.uniform(1, STORM_S), act)

    def _for_a_while(self, failure: InjectedFailure) -> None:
        self.cloud.failures.append(failure)
        self._later(lambda: setattr(failure, "times", 0))

    def _restock(self, pool: Pool) -> None:
        count = self.random.choice((0, 1, 3, 50))
        self.cloud.stock[(pool.zone, pool.machine, pool.spot)] = count

    def _change_quota(self, region: str) -> None:
        for metric in METRICS:
            self.cloud.quotas[(region, metric)] = self.random.choice((0, 2, 8, 60))

    def _change_target(self) -> None:
        pools = self.random.sample(POOLS, 3)
        self.wish = Counter({pool: self.random.randint(1, 3) for pool in pools})

    def _lag(self) -> tuple[float, float]:
        if self.calm:
            return 0.1, 0.1
        slow = self.random.random()
        there_s = self.random.uniform(8, 25) if slow < 0.02 else self.random.uniform(0.02, 0.5)
        back_s = 60.0 if slow > 0.98 else 0.05
        return there_s, back_s

    # ---- sailord ------------------------------------------------------------------------------

    def _lead(self) -> None:
        self._gateway.term += 1
        api = VirtualClient(self._rest, self._config, self._lag)
        state = State(
            term=self._gateway.term,
            nodes=Nodes(self._nodes),
            jobs={JOB: JobRecord(JOB, "running")},
            active=self._job(),
        )
        capacity = CapacityLoop(
            SimpleNamespace(
                cluster_name="test", cluster_file=None, profiles=None, measured_links=None
            ),
            GceProvider(self._config, CATALOGUE, api, self.now),
            self.policy,
            SeenCluster(state, self),
            SimpleNamespace(ask_capacity=self._plan),
            self._gateway,
            SimpleNamespace(now=self.now),
            new_id=lambda: str(uuid.UUID(int=self._ids.getrandbits(128))),
        )
        self.head = Head(capacity, asyncio.create_task(capacity.run()))

    async def _kill(self) -> None:
        """Kill sailord between two of its steps; requests on their way still arrive."""
        assert self.head is not None
        self.head.task.cancel()
        await asyncio.gather(self.head.task, return_exceptions=True)

    def _job(self) -> Any:
        """Return the job as capacity sees it: running on every node until stopped."""
        if not self._works:
            return None
        members = [id_ for id_, node in self._nodes.items() if not node.is_draining]
        generation = GenerationRecord(
            JOB, 1, "open", "", tuple(members), FIRST, self._gateway.term, ""
        )
        progress = SimpleNamespace(step=0, step_s=0.0)
        return SimpleNamespace(job=JOB, phase=None, generation=generation, progress=progress)

    async def _plan(self, request: CapacityRequest, **_: Any) -> CapacityAnswer:
        """Set a random target among running and available instances."""
        await asyncio.sleep(self.random.uniform(0.1, 2.0))
        return CapacityAnswer(tuple(self._count(pool) for pool in request.pools), "as scripted")

    def _count(self, pool: PoolSupply) -> int:
        own = Pool(pool.zone, pool.machine, pool.gpu, pool.gpus, pool.spot)
        return min(self.wish[own], pool.up + pool.obtainable)

    def up(self) -> Counter[Pool]:
        """Return the number of instances in each pool, as Google counts them."""
        there = ((vm.zone, vm.machine, vm.spot) for vm in self.cloud.there())
        return Counter(next(p for p in POOLS if (p.zone, p.machine, p.spot) == w) for w in there)

    def are_all_instances_usable(self) -> bool:
        """Return whether every instance has an agent with all of its GPUs."""
        gpus = {n.record.name: n.record.gpus for n in self._nodes.values() if not n.is_draining}
        return all(gpus.get(vm.name) == vm.gpus for vm in self.cloud.there())

    def overfilled_requests(self) -> list[str]:
        """Return requests that ever made more instances than they asked for."""
        return [id_ for id_, made in self.cloud.made.items() if made > self.cloud.ordered[id_]]

    def is_settled(self) -> bool:
        """Return whether neither Google nor sailord has instances or open requests left.

        A group may still make instances that an unanswered request has ordered.
        """
        assert self.head is not None
        state = self.head.capacity.state
        is_trying = any(group.wanted for group in self.cloud.groups.values())
        has_read = bool(state.prefix)  # A new leader knows nothing before it has read the books.
        return has_read and not (self.cloud.there() or is_trying or state.instances or state.asks)

    def stop_work(self) -> None:
        """Finish the job."""
        self._works = False
        self._tell_nodes()

    def _follow_order(self, order: Order) -> None:
        """Stop the job or drain a node, after some seconds for the checkpoint."""
        seconds = self.random.uniform(1, 30)
        if order.kind == "pause":
            self.cloud.after(seconds, self.stop_work)
        for id_, node in self._nodes.items():
            if order.kind == "drain" and node.record.name == order.target:
                self.cloud.after(seconds, lambda id_=id_: self._leave(id_))

    def _leave(self, id_: str) -> None:
        if id_ in self._nodes:
            self._nodes[id_] = replace(
                self._nodes[id_], exclusion=Exclusion(draining_since=self.now())
            )
            self._tell_nodes()

    def _tell_nodes(self) -> None:
        if self.head is not None:
            cluster = self.head.capacity.cluster
            cluster.state = replace(cluster.state, nodes=Nodes(self._nodes), active=self._job())

    # ---- instances -----------------------------------------------------------------------------

    def booted(self, vm: Vm) -> None:
        gpus = vm.gpus if vm.has_gpu else vm.gpus - 1
        if gpus:
            self.cloud.after(self.random.uniform(5, 40), lambda: self._register(vm, gpus))

    def _register(self, vm: Vm, gpus: int) -> None:
        if vm.status == "RUNNING":
            record = NodeRecord(
                str(vm.id), vm.name, vm.zone, vm.machine, "A100-40", gpus, "host:1", "ready",
                spot=vm.spot,
            )  # fmt: skip
            told = Report(record.id, 1, Fence(0, 0))
            self._nodes[str(vm.id)] = Node(record, self.now(), told)
            self._tell_nodes()

    def warned(self, vm: Vm, _: float) -> None:
        self._leave(str(vm.id))

    def ended(self, vm: Vm) -> None:
        self._nodes.pop(str(vm.id), None)
        self._tell_nodes()

    # ---- asks ---------------------------------------------------------------------------------

    def _check_asks(self) -> None:
        """Check that no request counts on top of its instances, or as lost while they exist."""
        assert self.head is not None
        state = self.head.capacity.state
        self._known |= state.instances.keys()
        known = [vm for vm in self.cloud.there() if str(vm.id) in state.instances]
        made = Counter(_request_of(vm) for vm in known)
        for id_, asked in state.asks.items():
            assert made[request_uuid(id_)] < asked.ask.count, (self.seed, id_, "counted twice")
        unanswered = {p: r.since for p, r in state.cooldowns.items() if r.text == UNANSWERED}
        for id_, asked in self._open.items():
            since = unanswered.get(asked.ask.pool)
            is_new = since is not None and since != self._unanswered.get(asked.ask.pool)
            if id_ not in state.asks and is_new:
                assert not made[request_uuid(id_)], (self.seed, id_, "it was answered")
        self._open, self._unanswered = dict(state.asks), unanswered

    # ---- money --------------------------------------------------------------------------------

    def spent(self) -> float:
        """Return the cost by sailord's records."""
        assert self.head is not None
        return spent_usd(self.head.capacity.state)

    def bill_of_known(self) -> float:
        """Return what Google charges for the instances that sailord has ever observed."""
        known = [vm for vm in self.cloud.vms if str(vm.id) in self._known]
        return sum(vm.usd(self.now()) for vm in known)

    def _check_money(self) -> None:
        now, most = self.now(), self.policy.usd_per_hour_max
        rate = sum(vm.usd_per_hour for vm in self.cloud.there() if vm.off_at is None)
        is_dear = most is not None and rate > most
        self._dear_since = (self._dear_since or now) if is_dear else None
        self.too_dear_s = max(self.too_dear_s, now - (self._dear_since or now))
        if self.policy.usd_max is not None:
            over = self.cloud.bill() - self.policy.usd_max - rate * self.policy.look_s / 3600
            self.overspent = max(self.overspent, over)


def _request_of(vm: Vm) -> str:
    """Return the id of the request that made an instance, as Google stores it."""
    label = vm.metadata.get(REQUEST_LABEL) or vm.body["labels"].get(REQUEST_LABEL, "")
    return request_uuid(label)


def _offer(machine: str, gpus: int) -> Offer:
    price = CATALOGUE.machine(machine).price("us-central1")
    assert price is not None
    spot, usual = price.usd_per_hour(spot=True), price.usd_per_hour(spot=False)
    return Offer("nvidia-tesla-a100", gpus, "NVIDIA_A100_GPUS", usual, spot)
