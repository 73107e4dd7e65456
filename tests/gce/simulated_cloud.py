"""A cloud on a virtual clock with random failures of every kind, and a bill."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

from agents.protocol.codec import decode, encode
from sailord.capacity.core import model
from sailord.capacity.core.budget import spent_usd, usd_per_hour
from sailord.capacity.core.deadline_model import Choice, DeadlineOptions, JobProgress
from sailord.capacity.core.decide import decide, record_of
from sailord.capacity.core.model import CapacityPolicy, CapacityState
from sailord.providers.interface import (
    DeleteResult,
    Granted,
    InDoubt,
    Instance,
    InstanceRequest,
    Observation,
    Pool,
    Preemption,
    QuotaUsage,
    Refused,
)
from tests.gce.cloud_instance import POOLS, PRICES, ZONES, CloudInstance, cost, hash_of

BEGIN, STEPS = 1_000_000.0, 200
"""When a script begins, and the steps of its job, if that has a deadline."""
STORM_S = 30.0
"""Longest time without an answer of the cloud; budgets keep a longer reserve."""
DARK_S = 600.0
"""Longest time in which a zone is not listed."""
UNSETTLED_S = DARK_S + 300.0
"""Longest time for which a request that made nothing counts as granted."""
RUN_S, ALONE_S = 2700.0, 900.0
"""After RUN_S the cloud deletes an instance; after ALONE_S without a leader its agent ends it."""
KINDS = ("stockout", "stockout", "stockout", "quota", "rate", "permission", "bad_request")


@dataclass(eq=False)
class Run:
    """One script: a cloud, the capacity core, and the shell between them."""

    seed: int
    policy: CapacityPolicy
    now: float = BEGIN
    calm: bool = False
    sent: Counter[str] = field(default_factory=Counter)
    asked: dict[str, InstanceRequest] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    instances: dict[str, CloudInstance] = field(default_factory=dict)
    past: list[CloudInstance] = field(default_factory=list)
    overspent: float = 0.0
    too_dear_s: float = 0.0
    """Longest continuous time above the hourly budget."""
    _dear_since: float | None = None
    works: bool = True
    known: set[str] = field(default_factory=set)
    """Numbers of all instances that sailord has ever seen."""
    drained: set[str] = field(default_factory=set)
    """Nodes that the job was ordered off."""
    said: list[str] = field(default_factory=list)
    leads: bool = False
    _terms: int = 0
    _books: model.CapacityRecord = field(default_factory=model.CapacityRecord)
    _saved_at: float = 0.0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _storm_until: float = 0.0
    _rotten_until: dict[Pool, float] = field(default_factory=dict)
    """Pools whose instances boot without an agent."""
    step: int = 0
    """Of the job, if it has a deadline."""
    told: int = 0
    """How often people were told about that."""
    away_usd: float = 0.0
    """What was spent while no sailord was there, or on instances of a zone that was not listed."""
    unspent_usd: float = 0.0
    """How much more was counted than spent when the total budget was declared spent, beyond what
    requests without an answer explain."""
    doubled: int = 0
    """Machines that were requested once more, since their request had been given up."""
    _dark_until: dict[str, float] = field(default_factory=dict)
    _led_until: float = 0.0
    _unseen: tuple[str, ...] = ()
    """Zones that the last observation lacked."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = CapacityState(self.policy)
        self.stock = {pool: self.random.choice((0, 0, 2, 5, 50)) for pool in POOLS}
        self.limits = {z: self.random.choice((0, 4, 12, 60)) for z in ZONES}
        self.want: Counter[Pool] = Counter()
        self.chances = random.Random(-self.seed)
        self.outages = random.Random(f"outages of {self.seed}")
        self.has_deadline = self.seed % 2 == 1

    # ---- time ---------------------------------------------------------------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call back after some time."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), act))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.at(seconds, again)

        self.at(seconds * self.random.random(), again)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    def begin(self) -> None:
        self.lead()
        self.every(5.0, lambda: self.feed(model.Tick(self.now)))
        self.every(self.policy.look_s, self.look)
        self.every(5.0, self.count_agents)
        self.every(30.0, self.plan)
        self.every(60.0, self.read)
        self.every(97.0, self.fail_at_random)
        self.every(150.0, self.hide_a_zone)

    # ---- sailord's side -----------------------------------------------------------------------

    def lead(self) -> None:
        self._terms += 1
        self.leads = True
        self.feed(
            model.TookOver(
                self.now, f"t{self._terms}", decode(model.CapacityRecord, encode(self._books))
            )
        )
        self.read()

    def end_leadership(self, away_s: float) -> None:
        """Be without a sailord for some time; in a long one agents end their instances."""
        self.feed(model.SteppedDown(self.now))
        self.leads, self._led_until = False, self.now
        before, ends = self.bill(), self.now + ALONE_S

        def end_alone() -> None:
            for rented in tuple(self.instances.values()):
                if rented.joins_at <= ends - ALONE_S and rented.dies_at > ends:
                    self.forget(rented)

        def come_back() -> None:
            self.away_usd += self.bill() - before
            self.lead()

        if away_s > ALONE_S:
            self.at(ALONE_S, end_alone)
        self.at(away_s, come_back)

    def feed(self, event: model.CapacityEvent) -> None:
        if not self.leads:
            return
        if isinstance(event, model.Observed):
            self._unseen = event.observation.unseen_zones
        there = self.state.instances.keys(), self.state.asks.keys()
        stop = event.books.stop if isinstance(event, model.TookOver) else self.state.stop
        self.state, commands = decide(self.state, event)
        if self.state.stop and not stop:
            most_usd = usd_per_hour(self.state) * UNSETTLED_S / 3600 + self.bill()
            self.unspent_usd = max(self.unspent_usd, spent_usd(self.state) - most_usd)
        self.forgive_unseen(self.state.instances.keys() - self.known)
        self.known |= self.state.instances.keys()
        # As the capacity loop: at once if instances came or went, before each request, and often.
        is_due = self.now > self._saved_at + 10.0 or any(
            isinstance(c, model.Create) for c in commands
        )
        is_due = is_due or there != (self.state.instances.keys(), self.state.asks.keys())
        if self.state.prefix and is_due:
            self._books, self._saved_at = record_of(self.state), self.now
        for command in commands:
            if self.leads:
                self.perform(command)
        self.check_money()

    def forgive_unseen(self, found: Set[str]) -> None:
        """Forgive what instances took from the budget's reserve before their zone was listed."""
        most = self.policy.usd_max
        unseen_usd = sum(
            cost(each, self.now) for each in self.unseen() if each.instance.id in found
        )
        if most is not None and unseen_usd:
            reserve = usd_per_hour(self.state) * self.policy.reserve_s / 3600
            lacking = self.bill() - self.away_usd - (most - reserve)
            self.away_usd += min(max(lacking, 0.0), unseen_usd)

    def unseen(self) -> list[CloudInstance]:
        """Return the instances in zones that were not listed since these were made."""
        unknown = [rented for id_, rented in self.instances.items() if id_ not in self.known]
        dark = self._dark_until
        return [r for r in unknown if dark.get(r.instance.pool.zone, 0.0) > r.instance.created_at]

    def perform(self, command: model.CapacityCommand) -> None:
        match command:
            case model.Create():
                assert command.ask.pool.zone not in self._unseen, "the request cannot be followed"
                self.count_doubles(command.ask.pool)
                if not self.loses_power() or self.outages.random() < 0.5:
                    self.create(command.ask)
            case model.Cancel():
                self.cancel(command.ask)
            case model.DeleteInstances():
                self.delete(command.ids)
            case model.Drain():
                self.drained.add(command.node)
            case model.PauseJob():
                self.at(self.random.uniform(1, 60), self.stop_work)
            case model.Tell():
                self.told += 1
            case model.Log():
                self.said.append(command.text)

    def count_doubles(self, pool: Pool) -> None:
        """Count what is up in a pool, or booting, at a further request, and was given up unseen."""
        for rented in self.instances.values():
            made = rented.instance
            is_up = made.pool == pool and rented.ends_at is None
            if is_up and made.id not in self.known and made.request_id not in self.state.asks:
                self.doubled += 1

    def loses_power(self) -> bool:
        """Lose the head for hours around a request, in a quarter of the scripts."""
        if self.calm or self.seed % 4 or self.outages.random() >= 0.05:
            return False
        self.end_leadership(self.outages.uniform(300.0, 14_400.0))
        return True

    def stop_work(self) -> None:
        self.works = False

    def plan(self) -> None:
        """Set a random target among running and available instances, as a planner would."""
        if not self.calm and self.random.random() < 0.2:
            self.want = Counter(
                {p: self.random.randint(0, 4) for p in self.random.sample(POOLS, 3)}
            )
        if not self.works or self.state.stop:
            self.want = Counter()
        self.feed(model.TargetSet(self.now, dict(self.want), self.options()))

    def options(self) -> DeadlineOptions | None:
        """What a job with a deadline could run on, in half of the scripts."""
        if self.calm or not self.want or not self.has_deadline:
            return None
        spot, firm = ({p: n for p, n in self.want.items() if p.spot is s} for s in (True, False))
        chance = self.chances.random
        now = Choice(spot, self.chances.uniform(5.0, 40.0), 2.0) if chance() < 0.5 else None
        steady = Choice(firm, 10.0, 4.0) if any(firm.values()) else None
        is_dear = steady is not None and now is None and not sum(spot.values()) % 2
        return DeadlineOptions("job", spot, now, steady, steady, "none", is_dear)

    def progress(self) -> None:
        """Report the progress of a job that is sometimes faster than an even pace."""
        if not self.has_deadline or not self.works:
            return
        if self.chances.random() < 0.5:
            self.step = min(self.step + self.chances.randint(0, 4), STEPS)
        self.feed(
            model.ProgressSeen(
                self.now,
                JobProgress(
                    "job", BEGIN, self.step, STEPS, BEGIN + 2400.0, is_running=bool(self.step),
                    redo_s=self.chances.uniform(0.0, 60.0),
                ),
            )
        )  # fmt: skip

    def read(self) -> None:
        if self.is_storm():
            return
        prices = {p: usd for p, usd in PRICES.items() if p != POOLS[-1]}
        self.feed(model.PricesRead(self.now, prices))
        self.feed(model.QuotasRead(self.now, self.quotas()))

    def count_agents(self) -> None:
        agents = {
            i.instance.node: model.Agent(i.gpus)
            for i in self.instances.values()
            if i.joins_at <= self.now < i.dies_at and i.ends_at is None
        }
        in_use = frozenset(name for name in agents if self.works and hash_of(name) % 3)
        wanted = {p for p, count in self.want.items() if count}
        pools = {i.instance.node: i.instance.pool for i in self.instances.values()}
        kept = frozenset(name for name in in_use if pools[name] in wanted) - self.drained
        self.feed(model.AgentsCounted(self.now, agents, kept))
        self.progress()

    # ---- the cloud's side ---------------------------------------------------------------------

    def is_storm(self) -> bool:
        return self.now < self._storm_until

    def hide_a_zone(self) -> None:
        """List no instances of a zone for a while; requests there get no answer."""
        if not self.calm and self.outages.random() < 0.4:
            hidden_s = self.outages.uniform(30.0, DARK_S)
            self._dark_until[self.outages.choice(ZONES)] = self.now + hidden_s

    def is_dark(self, zone: str) -> bool:
        return not self.calm and self.now < self._dark_until.get(zone, 0.0)

    def chance(self, share: float) -> bool:
        return not self.calm and self.random.random() < share

    def fail_at_random(self) -> None:
        """Cause a random event in the cloud."""
        if self.calm:
            return
        kind = self.random.choice(
            ("stock", "storm", "preempt", "preempt", "quota", "leader", "rot", "x")
        )
        if kind == "stock":
            self.stock[self.random.choice(POOLS)] = self.random.choice((0, 1, 3, 50))
        elif kind == "storm":
            self._storm_until = self.now + STORM_S
        elif kind == "quota":
            self.limits[self.random.choice(list(self.limits))] = self.random.choice((0, 8, 60))
        elif kind == "leader" and self.leads:
            away_s = 86_400.0 if self.random.random() < 0.05 else self.random.uniform(0, 15)
            self.end_leadership(away_s)
        elif kind == "rot":
            pool = self.random.choice(POOLS)
            self._rotten_until[pool] = self.now + self.random.uniform(60, 3600)
        elif kind == "preempt":
            spot = [i for i in self.instances.values() if i.instance.pool.spot and not i.ends_at]
            if spot:
                self.preempt(self.random.choice(spot))

    def preempt(self, rented: CloudInstance) -> None:
        rented.ends_at = self.now
        rented.instance = replace(rented.instance, state="preempted")
        if self.random.random() < 0.5:  # Or it stays listed until it is deleted.
            self.at(self.random.uniform(0, 60), lambda: self.forget(rented))

    def create(self, ask: InstanceRequest) -> None:
        self.sent[ask.request_id] += 1
        self.asked[ask.request_id] = ask
        lag = self.random.uniform(0.2, 20.0)
        if self.is_storm() or self.is_dark(ask.pool.zone):
            made = self.random.random() < (0.3 if self.is_storm() else 0.8)
            if made:
                self.at(lag, lambda: self.make(ask, ask.count))
            self.at(
                10.0, lambda: self.feed(model.RequestAnswered(self.now, InDoubt(ask.request_id)))
            )
            return
        used = self.used(ask.pool.zone)
        room = min(self.stock[ask.pool], (self.limits[ask.pool.zone] - used) // ask.pool.gpus)
        if self.chance(0.1) or room <= 0:
            kind = "stockout" if room <= 0 else self.random.choice(KINDS)
            refused = Refused(ask.request_id, kind, "as scripted")  # type: ignore[arg-type] # a KIND
            self.at(lag, lambda: self.feed(model.RequestAnswered(self.now, refused)))
            return
        count = min(ask.count, room)

        def grant() -> None:
            made = self.make(ask, count)
            if not self.chance(0.2):
                self.feed(model.RequestAnswered(self.now, Granted(ask.request_id, made)))
            else:
                self.feed(model.RequestAnswered(self.now, InDoubt(ask.request_id)))

        if self.chance(0.15):
            self.feed_later(10.0, model.RequestAnswered(self.now + 10.0, InDoubt(ask.request_id)))
            self.at(self.random.uniform(10.0, 60.0), lambda: self.make(ask, count) and None)
        else:
            self.at(lag, grant)

    def cancel(self, ask: InstanceRequest) -> None:
        """Withdraw a request; nothing waits here."""
        raise AssertionError(f"{ask} does not wait")

    def feed_later(self, seconds: float, event: model.CapacityEvent) -> None:
        self.at(seconds, lambda: self.feed(event))

    def make(self, ask: InstanceRequest, count: int) -> tuple[Instance, ...]:
        found = []
        for _ in range(count):
            number = next(self._count)
            instance = Instance(
                str(number),
                f"m{number}",
                ask.pool,
                "running",
                self.now,
                ask.request_id,
                f"n{number}",
                ends_at=None if self.calm else self.now + RUN_S,
            )
            rented = CloudInstance(instance, gpus=ask.pool.gpus)
            if instance.ends_at is not None:
                self.at(RUN_S, lambda i=rented: self.forget(i))
            is_rotten = not self.calm and self.now < self._rotten_until.get(ask.pool, 0.0)
            if not is_rotten and not self.chance(0.05):
                rented.joins_at = self.now + self.random.uniform(20, 90)
            if self.chance(0.05):
                rented.gpus -= 1
            if self.chance(0.05):
                rented.dies_at = rented.joins_at + self.random.uniform(0, 600)
            self.instances[instance.id] = rented
            self.made[ask.request_id] += 1
            self.stock[ask.pool] -= 1
            found.append(instance)
        return tuple(found)

    def used(self, zone: str) -> int:
        here = (i.instance.pool for i in self.instances.values() if i.ends_at is None)
        return sum(pool.gpus for pool in here if pool.zone == zone)

    def quotas(self) -> tuple[QuotaUsage, ...]:
        return tuple(
            QuotaUsage(
                f"GPUS-{zone}", tuple(p for p in POOLS if p.zone == zone), limit, self.used(zone)
            )
            for zone, limit in self.limits.items()
        )

    def delete(self, ids: tuple[str, ...]) -> None:
        if self.is_storm() or self.chance(0.1):
            failed = DeleteResult((), dict.fromkeys(ids, "503"))
            self.feed_later(5.0, model.DeletionAnswered(self.now + 5.0, failed))
            return
        for rented in [self.instances[id_] for id_ in ids if id_ in self.instances]:
            assert rented.instance.request_id, "an instance was deleted that was never requested"
            self.at(self.random.uniform(1, 20), lambda i=rented: self.forget(i))

    def forget(self, rented: CloudInstance) -> None:
        if self.instances.pop(rented.instance.id, None) is not None:
            rented.ends_at = rented.ends_at or self.now
            made = rented.instance
            was_dark = self._dark_until.get(made.pool.zone, 0.0) > made.created_at
            if was_dark and made.id not in self.known:
                # From the end of leadership on, all that the cloud charges is counted anyway.
                seen_s = max(self._led_until - made.created_at, 0.0)
                self.away_usd += (
                    cost(rented, self.now) if self.leads else PRICES[made.pool] * seen_s / 3600
                )
            self.stock[rented.instance.pool] += 1
            self.past.append(rented)

    def look(self) -> None:
        if self.is_storm():
            return
        begun, dark = self.now, {zone for zone in ZONES if self.is_dark(zone)}
        if self.chance(0.1):
            dark.add(self.random.choice(ZONES))
        unseen = tuple(sorted(dark))
        seen = tuple(
            i.instance for i in self.instances.values() if i.instance.pool.zone not in unseen
        )
        everything = [*self.past, *self.instances.values()]
        taken = tuple(
            Preemption(i.instance.id, i.ends_at)
            for i in everything
            if i.ends_at and i.instance.state == "preempted"
        )
        ended = {i.instance.id: i.ends_at for i in self.past if i.ends_at}
        observation = self.observed(
            Observation(begun, seen, unseen, taken, frozenset(), ended_at=ended)
        )
        lag = self.random.uniform(0.1, 3.0)
        self.at(lag, lambda: self.feed(model.Observed(self.now, observation)))

    def observed(self, observation: Observation) -> Observation:
        """Return what a look shows; a cloud with more to tell adds it."""
        return observation

    # ---- money --------------------------------------------------------------------------------

    def bill(self, *, of_known: bool = False) -> float:
        """Return what the cloud has charged so far."""
        every = (*self.past, *self.instances.values())
        return sum(cost(i, self.now) for i in every if not of_known or i.instance.id in self.known)

    def check_money(self) -> None:
        up = [i for i in self.instances.values() if i.ends_at is None]
        rate, most = sum(PRICES[i.instance.pool] for i in up), self.policy.usd_per_hour_max
        is_dear = most is not None and rate > most + 1e-9
        self._dear_since = (self._dear_since or self.now) if is_dear else None
        self.too_dear_s = max(self.too_dear_s, self.now - (self._dear_since or self.now))
        if self.policy.usd_max is not None:
            interval = rate * self.policy.look_s / 3600
            unseen_usd = sum(cost(each, self.now) for each in self.unseen())
            over = self.bill() - unseen_usd - self.away_usd - self.policy.usd_max - interval
            self.overspent = max(self.overspent, over)
