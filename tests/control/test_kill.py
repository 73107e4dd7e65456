"""Killing daemons at any moment does not interrupt the job."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from statistics import median
from typing import Any

import pytest

from tests.agents.store.places import ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.control.cluster import Cluster, left_behind, restart
from tests.control.recording import Recording, recording
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
NAMES = ("a", "b", "c")
EXAMPLES = os.environ.get("SAILOR_EXAMPLES")
KILLS = int(EXAMPLES or "40") // 10
ADOPTED_S, PAUSE_S = 2.0, 2.0
"""Median time until a new daemon has the old one's state, and longest time without a step; checked
by `make chaos` only, on an otherwise idle machine."""
LONGEST_S = {"calm": 0.5, "moving": 2.5, "starting": 1.0}
"""Longest wait before the next kill: the duration of what it should interrupt."""


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=pytest.mark.at_length)])
def stored(request, tmp_path):
    """One sailord with an embedded store, or with an etcd that outlives it."""
    with contextlib.ExitStack() as stack:
        place = Place(tmp_path)
        if request.param == "etcd":
            if ETCD is None:
                pytest.skip("no `etcd` here; apt-get install etcd-server")
            place = Place(tmp_path, store=stack.enter_context(closing(Etcd(1))).url)
        made = Cluster(tmp_path, [place])
        stack.callback(made.end)
        yield made


def test_job_continues_when_sailord_is_killed_at_any_failpoint(stored):
    """Kill it while steps go on, during a reconfiguration, and while it starts."""
    cluster = stored
    chance = random.Random(11)
    cluster.begin(*NAMES)
    place, moves = cluster.heads[0], 0
    head = place.processes[0]
    adopted_s = []
    with recording(cluster) as recorded:
        for number in range(KILLS):
            kind = ("calm", "moving", "starting")[number % 3]
            if kind != "starting":  # The move that the last kill met may still be under way.
                wait_until(lambda so_far=moves: has_moved(cluster, so_far))
            if kind == "moving":
                moves += 1
                if moves > 1:  # No node is drained before the first.
                    order(place, "withdraw", NAMES[(moves - 1) % 3])
                order(place, "drain", NAMES[moves % 3])
            time.sleep(chance.uniform(0.0, LONGEST_S[kind]))
            workers, step = cluster.workers(), cluster.count()[1]
            killed = head.pid
            head, since = restart(place, head)
            if kind == "starting":
                continue  # Kill the next one before it is up.
            wait_until(lambda least=step: is_adopted(cluster, least))
            if kind == "calm":
                adopted_s.append(time.monotonic() - since)
                assert cluster.workers() == workers
            wait_until(lambda pid=killed: not left_behind(pid))
        wait_until(lambda: has_moved(cluster, moves))
    recorded.check()
    assert recorded.records[-1].number > moves
    texts = [text for text in cluster.history() if " lost): " in text]
    print(
        f"{KILLS} kills, {moves} moves; {summary(recorded, adopted_s)}; {start_s('sailord.daemon')}"
    )
    assert len(texts) == len(set(texts))
    assert all("0 steps lost" in text for text in texts)
    judge(recorded, adopted_s)


def test_workers_survive_the_kill_of_their_agents(cluster):
    """Kill a random agent each time, and every fourth time sailord with it."""
    chance, cluster.agents_lease_s = random.Random(13), 30.0
    cluster.begin(*NAMES)
    workers, adopted_s = cluster.workers(), []
    head = cluster.heads[0].processes[0]
    with recording(cluster) as recorded:
        for number in range(KILLS):
            time.sleep(chance.uniform(0.0, 0.5))
            name = chance.choice(NAMES)
            node = wait_until(lambda name=name: node_of(cluster, name))
            agent, step = cluster.agents[name], cluster.count()[1]
            agent.kill()
            if number % 4 == 3:
                head, _ = restart(cluster.heads[0], head)
            agent.start()
            since = time.monotonic()
            wait_until(lambda node=node, step=step: has_new_agent(cluster, node, step))
            if number % 4 != 3:
                adopted_s.append(time.monotonic() - since)
            assert cluster.workers() == workers
        wait_until(cluster.is_running)
    recorded.check()
    print(f"{KILLS} kills of agents; {summary(recorded, adopted_s)}; {start_s('agents.main')}")
    assert recorded.records[-1].number == 1
    judge(recorded, adopted_s)


def judge(recorded: Recording, adopted_s: list[float]) -> None:
    if EXAMPLES:
        assert median(adopted_s) < ADOPTED_S
        assert recorded.longest_pause_s() < PAUSE_S


def summary(recorded: Recording, adopted_s: list[float]) -> str:
    """Return the summary that `make chaos` shows."""
    return (
        f"generation {recorded.records[-1].number}, step {recorded.counts[-1][2]}; "
        f"adopted within {max(adopted_s):.2f} s, "
        f"{median(adopted_s):.2f} s as a rule; "
        f"no step for {recorded.longest_pause_s():.2f} s at most"
    )


def start_s(module: str) -> str:
    """Return how long the interpreter takes to import the module alone."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return f"python takes {time.monotonic() - begun:.2f} s to import {module}"


def node_of(cluster: Cluster, name: str) -> Any:
    """Return a node as the leader reports it."""
    code, said = cluster.heads[0].ask("GET", "/v1/nodes")
    assert code == 200, f"sailord does not lead yet: {said}"
    found = [node for node in said["nodes"] if node["name"] == name]
    assert found, "the node is not known yet"
    return found[0]


def has_new_agent(cluster: Cluster, before: Any, step: int) -> bool:
    """Return whether the node has a new address and a higher step."""
    node = node_of(cluster, before["name"])
    assert node["id"] == before["id"], "the node got another id"
    return node["address"] != before["address"] and (node["step"] or 0) > step


def order(place: Place, what: str, node: str) -> None:
    """Send an order until the current sailord accepts it."""
    wait_until(lambda: place.ask("POST", f"/v1/nodes/{node}/{what}", {})[0] == 202)


def has_moved(cluster: Cluster, moves: int) -> bool:
    """Return whether the job runs without the node that was drained last."""
    left = NAMES[moves % 3] if moves else None
    return cluster.is_running() and left not in cluster.job()["members"]


def is_adopted(cluster: Cluster, step: int) -> bool:
    """Return whether a leader reports a step beyond the one at which its predecessor died."""
    status = cluster.heads[0].status()
    return status["leads"] and status["job"] is not None and status["job"]["step"] > step
