"""The job survives the death of leaders, of sailord and of etcd, and an outage of the store."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from tests.agents.store.places import NEEDS_ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.control.cluster import LEASE_S, Cluster, is_leader
from tests.control.recording import recording
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow, NEEDS_ETCD]
EXAMPLES = os.environ.get("SAILOR_EXAMPLES")
AWAY_S = 60.0 if EXAMPLES else 6.0
TAKEN_OVER_S = LEASE_S + 2.0
"""Limit of a failover; checked by `make chaos` only, on an otherwise idle machine."""


@pytest.fixture
def etcd():
    """An etcd of three members."""
    with closing(Etcd(3)) as place:
        yield place


@pytest.fixture
def cluster(tmp_path, etcd):
    """Two sailords: a leader and a standby."""
    made = Cluster(
        tmp_path, [Place(tmp_path, name=name, store=etcd.url) for name in ("one", "two")]
    )
    yield made
    made.end()


def test_standby_is_elected_when_the_leader_dies(cluster, etcd):
    cluster.begin("a", "b")
    workers = cluster.workers()
    with recording(cluster) as recorded:
        first = cluster.head
        (other,) = [head for head in cluster.heads if head is not first]
        step = cluster.count()[1]
        first.processes[0].kill()
        since = time.monotonic()
        wait_until(lambda: is_leader(other))
        took_s = time.monotonic() - since
        wait_until(lambda least=step: cluster.is_running(beyond=least))
        # Then kill etcd's leader; the two other members must elect another.
        member = asyncio.run(etcd.leader())
        etcd.kill([member])
        cluster.wait_steps(20)
        wait_until(lambda: other.ask("POST", "/v1/jobs", {"job": JOB, "id": "k"})[0] == 201)
        step = cluster.count()[1]
        wait_until(lambda: cluster.is_running(beyond=step))
        first.start()
        wait_until(lambda: first.ask("GET", "/readyz")[0] == 200)
        assert not is_leader(first)
    recorded.check()
    print(f"led after {took_s:.2f} s; no step for {recorded.longest_pause_s():.2f} s at most")
    assert not EXAMPLES or took_s < TAKEN_OVER_S
    assert cluster.workers() == workers
    assert recorded.records[-1].number == 1


def test_job_continues_while_the_store_is_unavailable(cluster, etcd):
    cluster.begin("a", "b")
    wait_until(lambda: any("started on " in text for text in cluster.history()))
    workers, history = cluster.workers(), cluster.history()
    head = cluster.head
    with recording(cluster) as recorded:
        etcd.kill()
        since = time.monotonic()
        wait_until(lambda: "store       does not answer" in status_of(head))
        while time.monotonic() < since + AWAY_S:
            cluster.wait_steps()
        assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "k"})[0] == 503
        assert head.ask("GET", "/livez")[0] == 200
        assert head.ask("GET", "/readyz")[0] == 503
        assert cluster.workers() == workers
        etcd.start()
        wait_until(lambda: any(is_leader(each) for each in cluster.heads))
        step = cluster.count()[1]
        wait_until(lambda: cluster.is_running(beyond=step))
        assert cluster.workers() == workers
        assert cluster.history() == history
        assert "store       does not answer" not in status_of(cluster.head)
        assert cluster.head.ask("POST", "/v1/nodes/b/drain", {})[0] == 202
        wait_until(lambda: cluster.is_running() and cluster.job()["members"] == ["a"])
    recorded.check()
    print(f"{AWAY_S:.0f} s without a store; no step for {recorded.longest_pause_s():.2f} s at most")
    assert recorded.records[-1].number == 2
    assert all("0 steps lost" in text for text in cluster.history() if " lost): " in text)


def status_of(head: Place) -> str:
    """Return the output of `sailorctl status`."""
    return CliRunner().invoke(main, ["status", "--server", f"unix://{head.socket}"]).output
