"""The whole cluster on a virtual clock: real decisions, simulated wires, disks and workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Literal

from agents.protocol.records import (
    Fence,
    JobId,
    JobRecord,
    NodeId,
    Order,
    Report,
    ReportReply,
    Saving,
)
from sailord.core.model.options import Options
from tests.sim.books import Books
from tests.sim.checker import Checker
from tests.sim.clock import EPOCH_S, Clock
from tests.sim.heads import Head
from tests.sim.machines import Machine
from tests.sim.objects import Objects
from tests.sim.planners import Planner, QuickPlanner
from tests.sim.storage import Store
from tests.sim.workers import LAYERS, Gangs

JOB = JobId("job")
OTHER = JobId("other")


@dataclass(frozen=True)
class Faults:
    """Kinds and rates of faults: together with a seed, the record replays a life."""

    every_s: float = 12.0
    loss: float = 0.02
    planner_dies: float = 0.02
    worker_bug: float = 0.02
    stuck_gang: float = 0.1
    setup_fails: float = 0.1
    """Lives in which it fails everywhere at first."""
    seals_slowly: bool = False
    """Sealing takes most of a step, and survivors of a loss seal the step that they were in."""
    survive: Literal["node", "zone"] = "node"
    """What the job must survive; the loss of a zone, if machines are in two."""
    kinds: tuple[str, ...] = (
        *("power_off", "power_off", "notice", "false_notice", "late_notice", "reboot", "add"),
        *("add", "agent_killed", "head_killed", "store_away", "cut_from_heads", "gang_killed"),
        *(
            "long_notice",
            "long_notice",
            "drain",
            "pause_resume",
            "head_cut",
            "head_frozen",
            "machine_frozen",
            "agent_frozen",
        ),
        *("clock_set", "compaction", "objects_away", "checkpoint_damaged", "replan"),
        *("objects_short", "objects_twice", "setup_fails"),
        *("checkpoint", "rollback"),
    )


MACHINE_FAULTS = Faults(
    kinds=("power_off", "notice", "long_notice", "reboot", "add", "add"),
    worker_bug=0.0,
    setup_fails=0.0,
)
"""Only machines come and go: nothing may count as a failure of the job."""

CONTROL_PLANE_FAULTS = Faults(
    kinds=(
        *("agent_killed", "agent_frozen", "head_killed", "head_frozen", "head_cut", "unheard"),
        *("store_away", "compaction", "clock_set", "objects_away"),
    ),
    every_s=6.0,
    worker_bug=0.0,
    setup_fails=0.0,
)
"""Only the control plane fails, again and again: the job must not notice."""


STRAGGLERS = Faults(
    kinds=(
        *("slow", "slow", "slow", "add", "add", "reboot", "notice", "false_notice", "agent_killed"),
        *("head_killed", "head_frozen", "store_away", "pause_resume"),
    ),
    worker_bug=0.0,
    setup_fails=0.0,
)
"""Machines become stragglers, and some recover, while others come and go."""

WRONG_BITS = Faults(
    kinds=(
        *("wrong_bits", "wrong_bits", "wrong_bits", "add", "add", "reboot", "power_off"),
        *("agent_killed", "head_killed", "head_frozen", "store_away", "notice", "pause_resume"),
    ),
    worker_bug=0.0,
    setup_fails=0.0,
)
"""The bits of machines are contradicted, while others come and go."""

SLOW_SEALS = Faults(
    kinds=("power_off", "power_off", "gang_killed", "gang_killed", "reboot", "add", "add"),
    loss=0.0,
    planner_dies=0.0,
    worker_bug=0.0,
    setup_fails=0.0,
    seals_slowly=True,
)
"""Nodes are lost, and states are large: each step that survivors seal in time must be kept."""

ZONES = Faults(
    kinds=(
        *("zone_off", "power_off", "gang_killed", "gang_killed", "drain", "drain", "add", "add"),
        *("add", "reboot", "head_killed", "agent_frozen", "cut_from_heads"),
    ),
    survive="zone",
)
"""Nodes of two zones, and all of one, are lost or drained."""

SHARING = Faults(
    setup_fails=0.0, kinds=(*Faults().kinds, *("cancel", "cancel", "pause_resume", "pause_resume"))
)
"""Where jobs share, orders are about any of them, and jobs are cancelled."""

STEP_S, LONG_STEP_S = 1.0, 4.0
"""In some lives a step takes longer than a node may be silent."""
LEASES_S = 10.0, 5.0, 20.0
"""Leases of agents; the first one is sailord's."""


class World:
    """The whole simulated cluster, driven by one seed."""

    def __init__(
        self, seed: int, faults: Faults, planner: Planner | None = None, *, sharing: int = 0
    ) -> None:
        self.random, self.faults = Random(seed), faults
        self.seed = seed
        is_long = seed % 4 == 0 or faults is SLOW_SEALS
        self.step_s = LONG_STEP_S if is_long else STEP_S
        self.lease_s = LEASES_S[seed % 3]
        self.clock = Clock()
        self.options = Options(
            start_s=30.0, stop_s=20.0, stall_s=30.0, secure_s=30.0, slow_steps=4, slow_s=5.0,
            unprepared_s=20.0,
        )  # fmt: skip
        self.gpus = ("V100-16", "T4") if sharing and seed % 2 else ("V100-16",)
        """Kinds of GPUs, in turn."""
        if sharing:
            self.options = replace(self.options, share=True, additions_gather_s=5.0)
        self.store = Store(self.clock, self.random)
        self.wire: Callable[[Any], Any] = lambda value: value
        self.objects = Objects()
        self.checker = Checker(self)
        self.books: Books | None = None
        self.planner = QuickPlanner() if planner is None else planner
        self.machines: dict[NodeId, Machine] = {}
        self.steps: dict[JobId, int | None] = {}
        """Of each job that was submitted."""
        self.first_job = JOB
        self.why_unfit = ""
        """Why no machine can be prepared, if that is so; new ones cannot either."""
        self.cut_from_heads: set[NodeId] = set()
        self.cut_from_peers: set[NodeId] = set()
        self.heads: dict[str, Head] = {}
        self.heads_ahead_s: dict[str, float] = {}
        self.count = 0
        if faults.setup_fails and self.random.random() < faults.setup_fails:
            self.why_unfit = "setup `make` exited with 2"
            self.clock.after(self.random.uniform(5.0, 100.0), self.mend_setup)
        self.gangs = Gangs(self)
        if sharing:
            self._submit_sharing(sharing)
        else:
            self._submit_jobs()
        for _ in range(5 + sharing):
            self.add_machine()
        self.start_head("head-a")
        self.start_head("head-b")

    def _submit_jobs(self) -> None:
        """Submit an endless job; in some lives one that ends, and another queued behind it."""
        has_place = self.random.random() < 0.7
        saving = Saving(
            uri="file:///checkpoints" if has_place else None,
            memory_every=self.random.choice((1, 1, 2, 3)),
            persist_every=self.random.choice((4, 10)),
            survive=self.faults.survive,
        )
        has_end = self.random.random() < (0.75 if self.why_unfit else 0.25)
        steps = self.random.randint(20, 60) if has_end else None
        # A stream of its own leaves earlier seeds' lives as they were.
        due_at = Random(-self.seed).choice((None, EPOCH_S + 60.0, EPOCH_S + 600.0))
        self.submit(
            JobRecord(
                JOB, "queued", steps=steps, layers=LAYERS, atoms=1, saving=saving, deadline=due_at
            )
        )
        if has_end:
            other = JobRecord(OTHER, "queued", submitted_at=1.0, layers=LAYERS, atoms=1)
            self.clock.after(self.random.uniform(0.0, 60.0), lambda: self.submit(other))

    def _submit_sharing(self, count: int) -> None:
        """Submit jobs that share the cluster, at random moments; some end."""
        for place in range(count):
            job = self.sharing_job(JOB if place == 0 else JobId(f"job-{place}"), float(place))
            self.clock.after(self.random.uniform(0.0, 50.0 * place), partial(self.submit, job))

    def sharing_job(self, id_: JobId, submitted_at: float) -> JobRecord:
        """Return a job that can share the cluster; some end."""
        steps = self.random.randint(20, 60) if self.random.random() < 0.3 else None
        saving = Saving("file:///checkpoints", self.random.choice((1, 2)), 4)
        return JobRecord(
            id_, "queued", submitted_at=submitted_at, steps=steps, layers=LAYERS, atoms=1,
            saving=saving,
        )  # fmt: skip

    def submit(self, job: JobRecord) -> None:
        self.steps[job.id] = job.steps
        self.store.put(f"/job/{job.id}/state", job)

    # ---- processes ------------------------------------------------------------------------

    def add_machine(self, name: str | None = None) -> Machine:
        self.count += 1
        machine = Machine(self, NodeId(f"n{self.count:03}"), name or f"m{self.count:03}")
        self.machines[machine.id] = machine
        return machine

    def start_head(self, name: str) -> None:
        self.heads[name] = Head(self, name)

    def up(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.is_up]

    def ready_machines(self) -> list[Machine]:
        return [m for m in self.up() if m.record.state == "ready"]

    def mend_setup(self) -> None:
        """Let the preparation of all machines succeed; an operator resumes the job."""
        self.why_unfit = ""
        for machine in self.up():
            machine.set_unfit("")
        self.give_order(Order(f"mended-{self.clock.now:.0f}", "resume", JOB))

    # ---- messages -------------------------------------------------------------------------

    def send(self, node: NodeId, what: Callable[[], None]) -> None:
        """Deliver a message between a node and the heads: late, sometimes never or twice."""
        if node in self.cut_from_heads or self.random.random() < self.faults.loss:
            return
        self.clock.after(self.random.uniform(0.001, 0.1), what)
        if self.random.random() < self.faults.loss:
            self.clock.after(self.random.uniform(0.1, 5.0), what)

    def report_to_heads(self, report: Report) -> None:
        report = self.wire(report)
        for head in list(self.heads.values()):
            if head.state.term is not None:
                self._hand(head, report)

    def _hand(self, head: Head, report: Report) -> None:
        head.run(lambda: head.hear(report))

    def deliver_abort(self, node: NodeId, job: JobId, fence: Fence) -> None:
        self.machines[node].tell(lambda agent: agent.hear_abort(job, fence))

    def wake(self, node: NodeId) -> None:
        self.machines[node].tell(lambda agent: agent.wake())

    def answer(self, report: Report, answer: ReportReply) -> None:
        """Deliver a head's reply to a report."""
        machine, job, answer = self.machines[report.node], report.job, self.wire(answer)
        assert job is not None, "an answer about no job"
        self.send(report.node, lambda: machine.tell(lambda agent: agent.hear_answer(job, answer)))

    def probe(self, node: NodeId, heard: Callable[[Report], None]) -> None:
        agent = self.machines[node].agent
        if agent is None or node in self.cut_from_heads or self.clock.now < agent.frozen_until:
            return
        report = agent.state.last_report
        if report is not None:
            self.send(node, lambda: heard(report))

    def give_order(self, order: Order) -> None:
        if f"/intent/{order.id}" not in self.store.entries:
            self.store.put(f"/intent/{order.id}", order)
