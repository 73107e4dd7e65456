"""The faults of the simulated world, each at a random moment."""

from __future__ import annotations

from collections.abc import Callable

from agents.protocol import Intent
from tests.sim.machines import Machine
from tests.sim.world import JOB, World

ALIVE_MIN = 3


class Trouble:
    """Strikes the world until told to stop."""

    def __init__(self, world: World, *, until: float) -> None:
        self.world, self.until = world, until
        self.random, self.clock = world.random, world.clock
        self.count = 0
        self._next()

    def _next(self) -> None:
        gap = self.random.expovariate(1 / self.world.faults.every_s)
        if self.clock.now + gap < self.until:
            self.clock.after(gap, self._strike)

    def _strike(self) -> None:
        kind = self.random.choice(self.world.faults.kinds)
        self.count += 1
        act: Callable[[], None] = getattr(self, f"_{kind}")
        act()
        self._next()

    def _victim(self) -> Machine | None:
        alive = self.world.up()
        return self.random.choice(alive) if len(alive) > ALIVE_MIN else None

    def _say(self, text: str) -> None:
        self.world.checker.struck(text)

    def _power_off(self) -> None:
        if machine := self._victim():
            self._say(f"power_off {machine.id}")
            machine.end()

    def _reboot(self) -> None:
        if machine := self._victim():
            self._say(f"reboot {machine.id}")
            machine.end()
            name = machine.name
            self.clock.after(self.random.uniform(0.1, 8.0), lambda: self._back(name))

    def _back(self, name: str) -> None:
        self.world.add_machine(name)

    def _add(self) -> None:
        if len(self.world.up()) < 9:
            self._say(f"add {self.world.add_machine().id}")

    def _notice(self) -> None:
        self._warn(self.random.choice((30.0, 30.0, 5.0)), is_true=True, says=True)

    def _late_notice(self) -> None:
        self._warn(self.random.uniform(0.0, 1.0), is_true=True, says=True)

    def _false_notice(self) -> None:
        self._warn(30.0, is_true=False, says=self.random.random() < 0.5)

    def _warn(self, seconds: float, *, is_true: bool, says: bool) -> None:
        machine = self._victim()
        if machine is None or machine.agent is None:
            return
        id_ = f"notice-{self.count}"
        self._say(f"notice {machine.id} {seconds:.1f} s{'' if is_true else ', false'}")
        leaves_at = self.clock.now + seconds if says else None
        machine.agent.notice(id_, leaves_at)
        machine.agent.notice(id_, leaves_at)  # They do come twice.

        def later() -> None:
            if not machine.is_up:
                return
            if is_true:
                machine.end()
            elif machine.agent is not None:
                machine.agent.withdraw(id_)

        self.clock.after(seconds, later)

    def _agent_killed(self) -> None:
        if (machine := self._victim()) and machine.agent is not None:
            self._say(f"agent_killed {machine.id}")
            machine.kill_agent()

    def _crew_killed(self) -> None:
        machine = self._victim()
        if machine is None or machine.crew is None:
            return
        self._say(f"crew_killed {machine.id}")
        generation, machine.crew = machine.crew.generation, None
        if machine.agent is not None:
            machine.agent.crew_exited(generation, "signal 9", is_bug=False)

    def _head_killed(self) -> None:
        up = [head for head in self.world.heads.values() if head.is_up]
        if up:
            head = self.random.choice(up)
            self._say(f"head_killed {head.name}")
            head.crash()

    def _head_paused(self) -> None:
        """Cut off from the store, it still believes that it leads."""
        head = self.random.choice(list(self.world.heads.values()))
        self._say(f"head_cut {head.name}")
        head.client.is_cut = True

        def back() -> None:
            head.client.is_cut = False

        self.clock.after(self.random.uniform(1.0, 25.0), back)

    def _store_away(self) -> None:
        self._say("store_away")
        self.world.store.go_away()
        self.clock.after(self.random.uniform(0.5, 30.0), self.world.store.come_back)

    def _cut_off(self) -> None:
        """The control plane does not reach a node; half the time its peers do not either."""
        machine = self._victim()
        if machine is None:
            return
        whole = self.random.random() < 0.5
        self._say(f"cut_off {machine.id}{' from its peers too' if whole else ''}")
        self.world.cut_off.add(machine.id)
        if whole:
            self.world.cut_pairs.add(machine.id)
        if machine.agent is not None:
            machine.agent.client.is_cut = True

        def back() -> None:
            self.world.cut_off.discard(machine.id)
            self.world.cut_pairs.discard(machine.id)
            if machine.agent is not None:
                machine.agent.client.is_cut = False

        self.clock.after(self.random.uniform(0.5, 40.0), back)

    def _drain(self) -> None:
        if machine := self._victim():
            self._say(f"drain {machine.id}")
            intent = Intent(f"drain-{self.count}", "drain", machine.id)
            self.world.raise_intent(intent)
            undo = Intent(f"undrain-{self.count}", "withdraw", machine.id)
            self.clock.after(60.0, lambda: self.world.raise_intent(undo))

    def _pause_resume(self) -> None:
        self._say("pause_resume")
        self.world.raise_intent(Intent(f"pause-{self.count}", "pause", JOB))
        again = Intent(f"resume-{self.count}", "resume", JOB)
        self.clock.after(self.random.uniform(1.0, 20.0), lambda: self.world.raise_intent(again))
