"""Carries out the faults of the simulated world, each at a random moment.

``Faults`` in ``tests.sim.world`` lists their kinds and rates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agents.protocol.records import Durable, JobId, Order
from tests.sim.clock import EPOCH_S
from tests.sim.heads import Head
from tests.sim.machines import Machine
from tests.sim.world import JOB, World

ALIVE_MIN = 3
UP_MAX = 9
HALF = 0.5


class FaultInjector:
    """Injects faults into the world until stopped."""

    def __init__(self, world: World, *, until: float) -> None:
        self.world, self.until = world, until
        self.random, self.clock = world.random, world.clock
        self.count = 0
        self._next()

    def _next(self) -> None:
        gap = self.random.expovariate(1 / self.world.faults.every_s)
        if self.clock.now + gap < self.until:
            self.clock.after(gap, self._inject)

    def _inject(self) -> None:
        kind = self.random.choice(self.world.faults.kinds)
        self.count += 1
        act: Callable[[], None] = getattr(self, f"_{kind}")
        act()
        self._next()

    def _random_machine(self) -> Machine | None:
        alive = self.world.up()
        return self.random.choice(alive) if len(alive) > ALIVE_MIN else None

    def _log(self, text: str) -> None:
        self.world.checker.log_fault(text)

    # ---- machines -------------------------------------------------------------------------

    def _power_off(self) -> None:
        if machine := self._random_machine():
            self._log(f"power_off {machine.id}")
            machine.end()

    def _zone_off(self) -> None:
        """Power all machines of a zone off, if enough are in another one."""
        if one := self._random_machine():
            there = [each for each in self.world.up() if each.record.zone == one.record.zone]
            self._log(f"zone_off {one.record.zone}")
            for machine in there:
                machine.end()
            for machine in there:
                self.clock.after(self.random.uniform(0.1, 8.0), partial(self._back, machine.name))

    def _reboot(self) -> None:
        if machine := self._random_machine():
            self._log(f"reboot {machine.id}")
            machine.end()
            name = machine.name
            self.clock.after(self.random.uniform(0.1, 8.0), lambda: self._back(name))

    def _back(self, name: str) -> None:
        self.world.add_machine(name)

    def _add(self) -> None:
        if len(self.world.up()) < UP_MAX:
            self._log(f"add {self.world.add_machine().id}")

    def _machine_frozen(self) -> None:
        """Suspend a whole machine; its peers wait for it."""
        if machine := self._random_machine():
            seconds = self.random.uniform(0.5, 30.0)
            self._log(f"machine_frozen {machine.id} {seconds:.1f} s")
            if machine.agent is not None:
                machine.agent.freeze(seconds)
            if machine.gang is not None:
                machine.gang.frozen_until = self.clock.now + seconds

    def _agent_killed(self) -> None:
        if (machine := self._random_machine()) and machine.agent is not None:
            self._log(f"agent_killed {machine.id}")
            machine.kill_agent()

    def _agent_frozen(self) -> None:
        if (machine := self._random_machine()) and machine.agent is not None:
            seconds = self.random.uniform(0.5, 30.0)
            self._log(f"agent_frozen {machine.id} {seconds:.1f} s")
            machine.agent.freeze(seconds)

    def _gang_killed(self) -> None:
        machine = self._random_machine()
        if machine is None or machine.gang is None:
            return
        self._log(f"gang_killed {machine.id}")
        generation, machine.gang = machine.gang.generation, None
        machine.tell(lambda agent: agent.gang_exited(generation, "signal 9"))

    def _clock_set(self) -> None:
        """Set a machine's clock, which processes started there later will use."""
        ahead_s = self.random.choice((-1.0, 1.0)) * self.random.choice((1.0, 60.0, 4000.0))
        if self.random.random() < HALF:
            name = self.random.choice(sorted(self.world.heads))
            self._log(f"clock_set {name} {ahead_s:+.0f} s")
            self.world.heads_ahead_s[name] = ahead_s
        elif machine := self._random_machine():
            self._log(f"clock_set {machine.id} {ahead_s:+.0f} s")
            machine.ahead_s = ahead_s

    def _slow(self) -> None:
        """Make a machine slower, for a while or forever; its peers wait for it."""
        if machine := self._random_machine():
            machine.times_slower = self.random.choice((1.3, 1.8, 3.0, 3.0))
            # The reconfiguration that follows is planned and may cost no step.
            self.world.checker.log(machine.id, f"---- slow x{machine.times_slower}")
            if self.random.random() < HALF:
                self.clock.after(self.random.uniform(5.0, 60.0), lambda: _heal(machine))

    def _wrong_bits(self) -> None:
        """Let a machine's bits be contradicted; later an operator may let it be used again."""
        if machine := self._random_machine():
            self._log(f"wrong_bits {machine.id}")
            self.world.gangs.contradict(machine)
            if self.random.random() < HALF:
                back = Order(f"uncordon-{self.count}", "uncordon", machine.id)
                wait_s = self.random.uniform(10.0, 60.0)
                self.clock.after(wait_s, lambda: self.world.give_order(back))

    # ---- notices and orders ---------------------------------------------------------------

    def _notice(self) -> None:
        self._warn(self.random.choice((30.0, 30.0, 5.0)), is_true=True, says=True)

    def _long_notice(self) -> None:
        """Announce an end well ahead: the job trains on until it has to leave, or it is withdrawn.

        Half of the machines go earlier than they say.
        """
        is_true = self.random.random() < HALF
        announced_s = self.random.uniform(40.0, 120.0)
        is_early = self.random.random() < HALF
        self._warn(
            announced_s * (self.random.random() if is_early else 1.0),
            is_true=is_true,
            says=True,
            announced_s=announced_s,
        )

    def _late_notice(self) -> None:
        self._warn(self.random.uniform(0.0, 1.0), is_true=True, says=True)

    def _false_notice(self) -> None:
        self._warn(30.0, is_true=False, says=self.random.random() < HALF)

    def _warn(
        self, seconds: float, *, is_true: bool, says: bool, announced_s: float | None = None
    ) -> None:
        """Announce an end, and let it come or withdraw it after ``seconds``."""
        machine = self._random_machine()
        if machine is None or machine.agent is None:
            return
        id_ = f"notice-{self.count}"
        self._log(f"notice {machine.id} {seconds:.1f} s{'' if is_true else ', false'}")
        ends_s = seconds if announced_s is None else announced_s
        leaves_at = EPOCH_S + self.clock.now + machine.ahead_s + ends_s if says else None
        for _ in range(2):  # Real notices may arrive twice.
            machine.tell(lambda agent: agent.notice(id_, leaves_at))

        def later() -> None:
            if not machine.is_up:
                return
            if is_true:
                machine.end()
            elif machine.agent is not None:
                machine.tell(lambda agent: agent.withdraw(id_))
            else:
                self.clock.after(1.0, later)

        self.clock.after(seconds, later)

    def _drain(self) -> None:
        if machine := self._random_machine():
            self._log(f"drain {machine.id}")
            order = Order(f"drain-{self.count}", "drain", machine.id)
            self.world.give_order(order)
            undo = Order(f"undrain-{self.count}", "withdraw", machine.id)
            self.clock.after(60.0, lambda: self.world.give_order(undo))

    def _job(self) -> JobId:
        """Return the job that an order is about: where jobs share, any that was submitted."""
        stored = (each for each in self.world.steps if self.world.store.get(f"/job/{each}/state"))
        known = sorted(stored) if self.world.options.share else []
        return self.random.choice(known) if known else JOB

    def _cancel(self) -> None:
        """Cancel a job; mostly another one is submitted soon."""
        job = self._job()
        self._log(f"cancel {job}")
        self.world.give_order(Order(f"cancel-{self.count}", "cancel", job))
        if self.random.random() > HALF / 2:
            following = self.world.sharing_job(JobId(f"after-{self.count}"), 100.0 + self.count)
            self.clock.after(self.random.uniform(0.0, 15.0), lambda: self.world.submit(following))

    def _pause_resume(self) -> None:
        job = self._job()
        self._log(f"pause_resume {job}")
        self.world.give_order(Order(f"pause-{self.count}", "pause", job))
        again = Order(f"resume-{self.count}", "resume", job)
        self.clock.after(self.random.uniform(1.0, 20.0), lambda: self.world.give_order(again))

    def _setup_fails(self) -> None:
        """Let the job's setup fail on a machine that is prepared anew, or on all, for a while."""
        why, lasts_s = "setup `make` exited with 2", self.random.uniform(5.0, 60.0)
        if self.random.random() < HALF:
            self._log("setup_fails everywhere")
            self.world.why_unfit = why
            for machine in self.world.up():
                machine.set_unfit(why)
            self.clock.after(lasts_s, self.world.mend_setup)
            return
        if one := self._random_machine():
            self._log(f"setup_fails {one.id}")
            one.set_unfit(why)
            self.clock.after(lasts_s, lambda: one.set_unfit(self.world.why_unfit))

    def _replan(self) -> None:
        self._log("replan")
        self.world.give_order(Order(f"replan-{self.count}", "replan", self._job()))

    def _checkpoint(self) -> None:
        self._log("checkpoint")
        self.world.give_order(Order(f"checkpoint-{self.count}", "checkpoint", self._job()))

    def _rollback(self) -> None:
        """Order a rollback to the checkpoint before the last."""
        job = self._job()
        durable = self.world.store.get(f"/job/{job}/durable")
        line = self.world.objects.line(durable if isinstance(durable, Durable) else None)
        if len(line) > 1:
            self._log(f"rollback to step {line[1].point.step}")
            self.world.give_order(Order(f"rollback-{self.count}", "rollback", job, durable=line[1]))

    # ---- heads, store, networks -----------------------------------------------------------

    def _head(self) -> Head:
        return self.random.choice([head for _, head in sorted(self.world.heads.items())])

    def _head_killed(self) -> None:
        head = self._head()
        if head.is_up:
            self._log(f"head_killed {head.name}")
            head.crash()

    def _head_frozen(self) -> None:
        """Freeze a head; after the thaw it still considers itself the leader."""
        head, seconds = self._head(), self.random.uniform(0.5, 25.0)
        self._log(f"head_frozen {head.name} {seconds:.1f} s")
        head.freeze(seconds)

    def _head_cut(self) -> None:
        """Cut a head off from the store; it still considers itself the leader."""
        head = self._head()
        self._log(f"head_cut {head.name}")
        head.client.is_cut = True

        def back() -> None:
            head.client.is_cut = False

        self.clock.after(self.random.uniform(1.0, 25.0), back)

    def _store_away(self) -> None:
        self._log("store_away")
        self.world.store.fail()
        self.clock.after(self.random.uniform(0.5, 30.0), self.world.store.recover)

    def _compaction(self) -> None:
        """Compact the store: half of the watches lose their pending changes."""
        self._log("compaction")
        self.world.store.drop_watches(HALF)

    def _objects_away(self) -> None:
        self._log("objects_away")
        self.world.objects.is_up = False
        self.clock.after(self.random.uniform(0.5, 30.0), self._objects_back)

    def _objects_back(self) -> None:
        self.world.objects.is_up = True

    def _objects_short(self) -> None:
        """Truncate writes to the object store; the writer verifies and repeats them."""
        self._log("objects_short")
        self.world.objects.truncates_writes = True
        self.clock.after(self.random.uniform(0.5, 10.0), self._objects_right)

    def _objects_twice(self) -> None:
        """Lose the answers to writes, so that they are repeated."""
        self._log("objects_twice")
        self.world.objects.loses_answers = True
        self.clock.after(self.random.uniform(0.5, 10.0), self._objects_right)

    def _objects_right(self) -> None:
        self.world.objects.truncates_writes = self.world.objects.loses_answers = False

    def _checkpoint_damaged(self) -> None:
        durable = self.world.store.get(f"/job/{self._job()}/durable")
        if isinstance(durable, Durable):
            self._log(f"checkpoint_damaged at step {durable.point.step}")
            self.world.objects.damage(durable)

    def _cut_from_heads(self) -> None:
        """Cut a node off from the control plane, half of the time from its peers, too."""
        self._cut(is_whole=self.random.random() < HALF)

    def _unheard(self) -> None:
        """Cut a node off from the control plane only; its workers continue."""
        self._cut(is_whole=False)

    def _cut(self, *, is_whole: bool) -> None:
        machine = self._random_machine()
        if machine is None:
            return
        self._log(f"cut_from_heads {machine.id}{' from its peers too' if is_whole else ''}")
        self.world.cut_from_heads.add(machine.id)
        if is_whole:
            self.world.cut_from_peers.add(machine.id)
        if machine.agent is not None:
            machine.agent.client.is_cut = True

        def back() -> None:
            self.world.cut_from_heads.discard(machine.id)
            self.world.cut_from_peers.discard(machine.id)
            if machine.agent is not None:
                machine.agent.client.is_cut = False

        self.clock.after(self.random.uniform(0.5, 40.0), back)


def _heal(machine: Machine) -> None:
    machine.times_slower = 1.0
