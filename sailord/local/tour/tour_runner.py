"""Causes the events of the tour, and measures what each of them cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sailord.local.cluster import ClusterError, LocalCluster
from sailord.local.tour.plan_holders import middle_node, replicated_holders, sole_holders
from sailord.local.tour.step_log import StepLog
from sailord.text.units import counted

STEPS_BETWEEN = 4
"""Steps that a generation does before the next event."""
WITHIN_S = 60.0
NOTICE_S = 30.0
NOTICE, LOSS, ADDITION = "notice", "loss", "addition"
"""Events that may lose no step; others may lose a step that the buddy node did not have yet."""
PHASES = ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")


@dataclass(frozen=True, slots=True)
class TourEvent:
    """An event and its measured cost."""

    kind: str
    about: str
    notice_s: float | None
    steps_lost: int
    downtime_s: float
    predicted_s: float | None
    phases: Mapping[str, float | None]

    @property
    def steps_allowed(self) -> int:
        """Steps that this event may lose."""
        return 0 if self.kind in (NOTICE, LOSS, ADDITION) else 1

    @property
    def lost(self) -> str:
        """The steps lost, as text."""
        return f"{counted(self.steps_lost, 'step')} lost"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"downtime_s": round(self.downtime_s, 4)}


@dataclass(eq=False)
class TourRunner:
    """Runs the events of one job on a cluster."""

    cluster: LocalCluster
    job: str
    ledger: StepLog
    say: Callable[[str], None]
    events: list[TourEvent] = field(default_factory=list)

    # ---- events ---------------------------------------------------------------------------------

    def give_notice(self) -> None:
        """Announce that a node will be preempted in 30 s."""
        plan = self._plan()
        node = middle_node(replicated_holders(plan, longest_first=True) or sole_holders(plan), plan)
        name = self._names()[node]

        def act() -> None:
            body = {"notice_s": NOTICE_S, "reason": "the tour"}
            self.cluster.client.ask("POST", f"/v1/nodes/{name}/preempt", body)

        about = f"{name} will be preempted in {NOTICE_S:.0f} s"
        self._stage(NOTICE, about, act, notice_s=NOTICE_S, is_planned=True)
        # No need to wait for the end of the notice: nothing runs on it any more.
        self.cluster.kill_node(name)

    def lose_a_replica(self) -> None:
        """Kill a node whose layers other nodes train, too."""
        plan = self._plan()
        nodes = replicated_holders(plan)
        if not nodes:
            raise ClusterError("no node has only replicated layers; the tour cannot continue")
        name = self._names()[middle_node(nodes, plan)]
        about = f"{name} dies; other nodes train its layers, too"
        self._stage(LOSS, about, lambda: self.cluster.kill_node(name))

    def lose_the_only_copy(self) -> None:
        """Kill a node that alone trains its layers; its buddy has replicas of the snapshots."""
        while not (nodes := sole_holders(self._plan())):
            self.lose_a_replica()
        name = self._names()[middle_node(nodes, self._plan())]
        about = f"{name} dies; no other node trains its layers, its buddy has a replica"
        self._stage("loss of the only copy", about, lambda: self.cluster.kill_node(name))

    def lose_beside_hung_workers(self) -> None:
        """Kill a node while the workers of all others but one hang and must be killed."""
        plan, names = self._plan(), self._names()
        lost = middle_node(replicated_holders(plan) or sole_holders(plan), plan)
        _, *others = sorted({*replicated_holders(plan), *sole_holders(plan)} - {lost})

        def act() -> None:
            for node in others:
                self.cluster.hang_workers(names[node])
            self.cluster.kill_node(names[lost])

        about = f"{names[lost]} dies, and all workers but one hang"
        self._stage("loss, others killed", about, act)

    def add_machines(self, *machines: tuple[str, str]) -> None:
        """Add nodes."""

        def act() -> None:
            for kind, zone in machines:
                self.cluster.add_node(kind, zone)

        about = f"{len(machines)} nodes join"
        self._stage(ADDITION, about, act, is_planned=True)

    def end(self) -> int:
        """Cancel the job; return its last step."""
        last = self._trains()
        self.cluster.client.ask("POST", f"/v1/jobs/{self.job}/cancel")

        def is_over() -> bool:
            jobs = self.cluster.client.ask("GET", "/v1/jobs")["jobs"]
            return any(j["id"] == self.job and j["state"] == "cancelled" for j in jobs)

        self._wait("the job did not end", is_over)
        self.ledger.read_new_lines()
        return self.ledger.highest(last)

    # ---- measuring ------------------------------------------------------------------------------

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
        self._wait("the job did not resume", lambda: self._trains() > before)
        after = self._trains()
        record = self._job()["generation"]
        restored = record["restore"]["point"]["step"]
        self._wait("no step was done", lambda: self.ledger.find(after, restored + 1))
        reached = self.ledger.highest(before)
        first = self.ledger.find(after, restored + 1)
        last = self.ledger.find(before, reached)
        assert first is not None
        assert last is not None
        begun = last.at if is_planned else at
        told = self._move(after)
        event = TourEvent(
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
            f"  resumes from step {restored} ({record['restore']['source']}): "
            f"{event.lost}, {event.downtime_s:.2f} s downtime"
        )
        self._wait_steps()

    def _wait_steps(self) -> int:
        """Wait until the generation has done ``STEPS_BETWEEN`` steps; return its number."""

        def has_done_some() -> bool:
            generation = self._job()["generation"]
            done = self.ledger.highest(generation["number"])
            return done >= int(generation["restore"]["point"]["step"]) + STEPS_BETWEEN

        self._wait("the job makes no progress", has_done_some)
        return self._trains()

    def _move(self, generation: int) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = []

        def look() -> bool:
            moves = self.cluster.client.ask("GET", f"/v1/jobs/{self.job}/moves")["moves"]
            found.extend(move for move in moves if move["generation"] == generation)
            return bool(found)

        self._wait("sailord did not record the reconfiguration", look)
        return {**found[0], "phases": dict(found[0]["phases"])}

    # ---- observing ------------------------------------------------------------------------------

    def _active(self) -> dict[str, Any] | None:
        """Return the job's status; ``None`` before its start and after its end."""
        job: dict[str, Any] | None = self.cluster.client.ask("GET", "/v1/status")["job"]
        if job is None or job["id"] != self.job:
            return None
        if job["phase"]["name"] == "held":
            raise ClusterError(f"{self.job} is held: {job['phase']['reason']}")
        return job

    def _job(self) -> dict[str, Any]:
        job = self._active()
        if job is None:
            raise ClusterError(f"{self.job} does not run")
        return job

    def _plan(self) -> dict[str, Any]:
        plan = self._job()["plan"]
        assert plan is not None
        return dict(plan)

    def _names(self) -> dict[str, str]:
        nodes = self.cluster.client.ask("GET", "/v1/nodes")["nodes"]
        return {node["id"]: node["name"] for node in nodes}

    def _trains(self) -> int:
        """Return the generation that has done a step; 0 if none has."""
        job = self._active()
        if job is None or job["generation"] is None:
            return 0
        number, begun = job["generation"]["number"], job["generation"]["restore"]["point"]["step"]
        return int(number) if self.ledger.highest(number) > begun else 0

    def _wait(self, complaint: str, holds: Callable[[], object]) -> None:
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            self.ledger.read_new_lines()
            if holds():
                return
            for told in self.cluster.look_after():
                raise ClusterError(told)
            time.sleep(0.05)  # More often would slow the cluster down.
        raise ClusterError(f"{complaint} within {WITHIN_S:.0f} s")
