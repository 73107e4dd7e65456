"""A real sailord and real agents with a fake metadata server, followed through the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.cloud.notices import PREEMPTED
from sailord.client import Client, Reconnector
from sailord.notify.webhook_signature import SIGNATURE_HEADER, sign
from tests.control.cluster import LEASE_S, Agent, Cluster, is_leader
from tests.fakes.metadata import Metadata, metadata_server
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, Over, Place

TAKEN = "a"
"""The node on which the job begins; its agent has the fake metadata server."""
KEPT = "b"
"""The node that joins later, to move to."""
SECRET = "of-webhook-senders"
WITHIN_S = 120.0
DECIDED_S = 1.0
"""Time limit from the flip of the flag to another plan, ..."""
MISSED_S = LEASE_S + 2.0
"""... and from a silent death to its detection."""
Event = dict[str, Any]


def is_noticed(event: Event) -> bool:
    """Return whether sailord has the notice."""
    return bool(event["kind"] == "node_preempted")


def is_stopping(event: Event) -> bool:
    """Return whether the generation is stopping for a plan without the node."""
    return "stopping: " in str(event["text"])


def is_lost(event: Event) -> bool:
    """Return whether a member of the generation counts as lost."""
    return " is lost: " in str(event["text"])


@dataclass(eq=False)
class DetectionCluster:
    """One cluster of two nodes."""

    cluster: Cluster
    server: Metadata

    @property
    def taken(self) -> Agent:
        return self.cluster.agents[TAKEN]

    @property
    def kept(self) -> Agent:
        return self.cluster.agents[KEPT]

    async def flip(self, value: str) -> None:
        """Set the metadata server's preemption flag."""
        await self.server.flip(PREEMPTED, value)

    def post_notice(self) -> None:
        """Report the machine's preemption through the webhook."""
        body = json.dumps({"id": "from-outside", "node": TAKEN}).encode()
        header = {SIGNATURE_HEADER: sign(SECRET.encode(), body, time.time())}
        with contextlib.closing(Over(self.cluster.head.socket)) as connection:
            connection.request("POST", "/v1/webhooks/preemption", body, header)
            assert connection.getresponse().status == 202

    def shut_down(self) -> None:
        """Stop the agent's unit, as the machine's shutdown does."""
        assert self.taken.process is not None
        self.taken.process.terminate()

    def events(self) -> list[Event]:
        """Return all of sailord's events."""
        client = Client(f"unix://{self.cluster.head.socket}")
        events: list[Event] = client.ask("GET", "/v1/events?follow=false")["events"]
        return events

    async def event_delays_s(
        self, act: Callable[[], Any], *ones: Callable[[Event], bool]
    ) -> tuple[float, ...]:
        """Act; return the seconds until each of sailord's events, in order."""
        client = Client(f"unix://{self.cluster.head.socket}")
        before = self.events()
        last = before[-1]["id"] if before else 0
        listening = asyncio.create_task(asyncio.to_thread(_await_all, client, last, ones))
        await asyncio.sleep(0.3)  # Wait until it listens; earlier events are sent again.
        begun = time.perf_counter()
        done = act()
        if asyncio.iscoroutine(done):
            await done
        found = await asyncio.wait_for(listening, WITHIN_S)
        return tuple(at - begun for at in found)

    async def until_gone(self, act: Callable[[], Any]) -> float:
        """Act; return the seconds until the node is no longer listed."""
        begun = time.perf_counter()
        act()
        while time.perf_counter() < begun + WITHIN_S:
            _, answer = await asyncio.to_thread(self.cluster.head.ask, "GET", "/v1/nodes")
            states = {node["name"]: node["state"] for node in answer["nodes"]}
            if states.get(TAKEN, "lost") in ("suspect", "lost"):
                return time.perf_counter() - begun
            await asyncio.sleep(0.02)
        raise TimeoutError("the node is still listed")

    def wait_until_moved(self) -> None:
        """Return when the job runs on the other node."""
        wait_until(
            lambda: self.cluster.job()["members"] == [KEPT] and self.cluster.is_running(),
            within_s=WITHIN_S,
        )


def _await_all(
    client: Client, after: int, ones: tuple[Callable[[Event], bool], ...]
) -> list[float]:
    found: list[float] = []
    for event in client.follow(after, Reconnector(print)):
        if ones[len(found)](event):
            found.append(time.perf_counter())
        if len(found) == len(ones):
            break
    return found


def _begin(cluster: Cluster) -> None:
    cluster.head.start()
    wait_until(lambda: is_leader(cluster.head))
    cluster.join(TAKEN)
    code, said = cluster.head.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})
    assert code == 201, said
    wait_until(cluster.is_running, within_s=WITHIN_S)
    cluster.join(KEPT)


@contextlib.asynccontextmanager
async def detection_cluster(folder: Path) -> AsyncIterator[DetectionCluster]:
    """Two nodes, and a job that runs on one of them."""
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    webhooks = '\n[webhooks]\nsecret_file = "secret"\n'
    cluster = Cluster(folder, [Place(folder, webhooks=webhooks)])
    async with metadata_server() as server:
        cluster.metadata = {TAKEN: server.address}
        try:
            await asyncio.to_thread(_begin, cluster)
            yield DetectionCluster(cluster, server)
        finally:
            await asyncio.to_thread(cluster.end)
