"""What the tour does to a cluster, one event at a time, and what each of them cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sailord.local.cluster import Failed, LocalCluster
from sailord.local.tour.plan_holders import inner, only_holders, shared_holders
from sailord.local.tour.step_log import Ledger

STEPS_BETWEEN = 4
"""A generation does at least so many before the next event."""
WITHIN_S = 60.0
NOTICE_S = 30.0
NOTICE, LOSS, ADDITION = "notice", "loss", "addition"
"""Events at which nothing may be lost; elsewhere a step that its buddy did not yet have may be."""
PHASES = ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")


@dataclass(frozen=True, slots=True)
class Event:
    """One event, and what came of it."""

    kind: str
    about: str
    notice_s: float | None
    steps_lost: int
    downtime_s: float
    predicted_s: float | None
    phases: Mapping[str, float | None]

    @property
    def steps_allowed(self) -> int:
        """More than so many mean that something was lost."""
        return 0 if self.kind in (NOTICE, LOSS, ADDITION) else 1

    @property
    def lost(self) -> str:
        """In words."""
        return f"{self.steps_lost} step{'s' if self.steps_lost != 1 else ''} lost"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "about": self.about,
            "notice_s": self.notice_s,
            "steps_lost": self.steps_lost,
            "downtime_s": round(self.downtime_s, 4),
            "predicted_s": self.predicted_s,
            "phases": dict(self.phases),
        }


@dataclass(eq=False)
class Director:
    """One job's story on a cluster."""

    cluster: LocalCluster
    job: str
    ledger: Ledger
    say: Callable[[str], None]
    events: list[Event] = field(default_factory=list)

    # ---- the four events ------------------------------------------------------------------------

    def give_notice(self) -> None:
        """The cloud says that it will take a machine in 30 seconds."""
        plan = self._plan()
        node = inner(shared_holders(plan, longest_first=True) or only_holders(plan), plan)
        name = self._names()[node]

        def act() -> None:
            body = {"leaves_at": time.time() + NOTICE_S, "reason": "the tour"}
            self.cluster.client.ask("POST", f"/v1/nodes/{name}/preempt", body)

        about = f"{name} is to be taken away in {NOTICE_S:.0f} s"
        self._stage(NOTICE, about, act, notice_s=NOTICE_S, is_planned=True)
        # Its notice need not run out before we go on: nothing runs on it any more.
        self.cluster.kill_node(name)

    def lose_a_replica(self) -> None:
        """A machine dies whose layers live elsewhere too."""
        plan = self._plan()
        nodes = shared_holders(plan)
        if not nodes:
            raise Failed("no machine's layers live elsewhere too; the tour cannot go on")
        name = self._names()[inner(nodes, plan)]
        about = f"{name} dies at once; its layers live elsewhere too"
        self._stage(LOSS, about, lambda: self.cluster.kill_node(name))

    def lose_the_only_copy(self) -> None:
        """A machine dies that alone had its layers; its buddy has copies of their snapshots."""
        while not (nodes := only_holders(self._plan())):
            self.lose_a_replica()
        name = self._names()[inner(nodes, self._plan())]
        about = f"{name} dies at once; nobody else trains its layers, but its buddy has a copy"
        self._stage("loss of the only copy", about, lambda: self.cluster.kill_node(name))

    def lose_beside_hung_workers(self) -> None:
        """A machine dies, and all workers but one hang: they hear nothing, and are killed."""
        plan, names = self._plan(), self._names()
        lost = inner(shared_holders(plan) or only_holders(plan), plan)
        _, *others = sorted({*shared_holders(plan), *only_holders(plan)} - {lost})

        def act() -> None:
            for node in others:
                self.cluster.hang_workers(names[node])
            self.cluster.kill_node(names[lost])

        about = f"{names[lost]} dies at once, and all workers but one hang"
        self._stage("loss, others killed", about, act)

    def add_machines(self, *machines: tuple[str, str]) -> None:
        """New machines come."""

        def act() -> None:
            for kind, zone in machines:
                self.cluster.add_node(kind, zone)

        about = f"{len(machines)} machines come"
        self._stage(ADDITION, about, act, is_planned=True)

    def end(self) -> int:
        """End the job; return the last step that it did."""
        last = self._trains()
        self.cluster.client.ask("POST", f"/v1/jobs/{self.job}/cancel")

        def is_over() -> bool:
            jobs = self.cluster.client.ask("GET", "/v1/jobs")["jobs"]
            return any(j["id"] == self.job and j["state"] == "cancelled" for j in jobs)

        self._wait("the job did not end", is_over)
        self.ledger.look()
        return self.ledger.highest(last)

    # ---- what an event costs --------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until the job trains."""
        self._wait("the job did not start", lambda: self._trains() > 0)
        self._wait_steps()

    def _stage(
        self,
        kind: str,
        about: str,
        act: Callable[[], None],
        *,
        notice_s: float | None = None,
        is_planned: bool = False,
    ) -> None:
        self.say(f"{kind}: {about}")
        before = self._wait_steps()
        at = time.time()
        act()
        self._wait("the job did not go on", lambda: self._trains() > before)
        after = self._trains()
        record = self._job()["generation"]
        restored = record["restore"]["point"]["step"]
        self._wait("no step was done", lambda: self.ledger.end_of(after, restored + 1))
        reached = self.ledger.highest(before)
        first = self.ledger.end_of(after, restored + 1)
        last = self.ledger.end_of(before, reached)
        assert first is not None
        assert last is not None
        begun = last.at if is_planned else at
        told = self._move(after)
        event = Event(
            kind,
            about,
            notice_s,
            max(reached - restored, 0),
            max(first.at - begun - self.ledger.median_s(before), 0.0),
            told.get("predicted_s"),
            {name: told.get("phases", {}).get(name) for name in PHASES},
        )
        self.events.append(event)
        self.say(
            f"  goes on from step {restored} ({record['restore']['source']}): "
            f"{event.lost}, {event.downtime_s:.2f} s without a step"
        )
        self._wait_steps()

    def _wait_steps(self) -> int:
        """Wait until a generation has done some steps; return which."""

        def has_done_some() -> bool:
            generation = self._job()["generation"]
            done = self.ledger.highest(generation["number"])
            return done >= int(generation["restore"]["point"]["step"]) + STEPS_BETWEEN

        self._wait("the job does not get on", has_done_some)
        return self._trains()

    def _move(self, generation: int) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = []

        def look() -> bool:
            moves = self.cluster.client.ask("GET", f"/v1/jobs/{self.job}/moves")["moves"]
            found.extend(move for move in moves if move["generation"] == generation)
            return bool(found)

        self._wait("sailord does not tell what the move took", look)
        return {**found[0], "phases": dict(found[0]["phases"])}

    # ---- looking --------------------------------------------------------------------------------

    def _active(self) -> dict[str, Any] | None:
        """The job as it stands; none: it has not begun, or is over."""
        job: dict[str, Any] | None = self.cluster.client.ask("GET", "/v1/status")["job"]
        if job is None or job["id"] != self.job:
            return None
        if job["phase"]["name"] == "held":
            raise Failed(f"{self.job} is on hold: {job['phase']['reason']}")
        return job

    def _job(self) -> dict[str, Any]:
        job = self._active()
        if job is None:
            raise Failed(f"{self.job} is not what runs")
        return job

    def _plan(self) -> dict[str, Any]:
        plan = self._job()["plan"]
        assert plan is not None
        return dict(plan)

    def _names(self) -> dict[str, str]:
        nodes = self.cluster.client.ask("GET", "/v1/nodes")["nodes"]
        return {node["id"]: node["name"] for node in nodes}

    def _trains(self) -> int:
        """The generation that trains, by the steps that it has done; 0 while none does."""
        job = self._active()
        if job is None or job["generation"] is None:
            return 0
        number, begun = job["generation"]["number"], job["generation"]["restore"]["point"]["step"]
        return int(number) if self.ledger.highest(number) > begun else 0

    def _wait(self, complaint: str, holds: Callable[[], object]) -> None:
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            self.ledger.look()
            if holds():
                return
            for told in self.cluster.look_after():
                raise Failed(told)
            time.sleep(0.05)  # Whoever looks more often disturbs what it looks at.
        raise Failed(f"{complaint} within {WITHIN_S:.0f} s")
