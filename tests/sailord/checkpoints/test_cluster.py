"""Checkpoints of a whole cluster: real sailord, real agents, workers with made-up bytes."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from sailord.checkpoints.object_storage import open_storage
from sailord.cli.main import main
from tests.control.cluster import JOB
from tests.fakes.object_stores import object_stores
from tests.processes import wait_until
from tests.sailord.daemon.test_cluster_commands import call

pytestmark = pytest.mark.slow
WITHIN_S = 150.0


def durable(cluster):
    found = cluster.head.ask("GET", "/v1/jobs/j")[1]["durable"]
    return 0 if found is None else found["point"]["step"]


def kept(store):
    """Return the steps that have a manifest."""
    names = [entry.name for entry in open_storage(store).entries("j")]
    found = (re.match(r"\d+-(\d+)/manifest", name) for name in names)
    return sorted(int(each[1]) for each in found if each is not None)


@pytest.fixture(params=["file", "s3", pytest.param("gs", marks=pytest.mark.at_length)])
def store(request, tmp_path):
    """Return where checkpoints are kept; s3fs and gcsfs write to servers of this process."""
    if request.param == "file":
        yield f"file://{tmp_path}/kept"
        return
    with object_stores():
        yield f"{request.param}://bucket/kept"


def test_committed_checkpoint_survives_the_loss_of_all_nodes(store, cluster):
    saving = f'[checkpoint]\nuri = "{store}"\nmemory_every = 10\npersist_every = 20\nkeep = 2\n'
    cluster.begin("a", "b", job=JOB + saving)
    head = cluster.head
    wait_until(lambda: durable(cluster) >= 60, within_s=WITHIN_S)
    wait_until(lambda: len(kept(store)) <= 3, within_s=WITHIN_S)

    def pin():
        """Pin the durable checkpoint; before the order arrives, newer ones may have replaced it."""
        step = durable(cluster)
        return step if call(head, "checkpoint", "pin", "j", str(step)).exit_code == 0 else None

    pinned = wait_until(pin, within_s=WITHIN_S)
    ordered = json.loads(call(head, "checkpoint", "now", "j", "--json").stdout)
    assert ordered["step"] >= pinned
    checked = call_offline("checkpoint", "verify", "j", str(pinned), "--at", store)
    assert checked.exit_code == 0, checked.output  # The others may be deleted at any moment.

    for agent in cluster.agents.values():
        agent.kill_node()
    for agent in cluster.agents.values():
        shutil.rmtree(agent.folder / agent.name)  # Nothing is left in memory.
    before = durable(cluster)
    for agent in cluster.agents.values():
        agent.start()

    def restored():
        """The generation from the checkpoint; one on the second node alone may come before it."""
        restore = head.ask("GET", "/v1/jobs/j")[1]["generation"]["restore"]
        return restore if restore["source"] == "durable" else None

    assert wait_until(restored, within_s=WITHIN_S)["point"]["step"] >= before
    wait_until(lambda: cluster.is_running(beyond=before), within_s=WITHIN_S)
    wait_until(lambda: durable(cluster) > before + 40, within_s=WITHIN_S)
    assert pinned in kept(store), "what is pinned stays"
    checked = call_offline("checkpoint", "verify", "j", str(pinned), "--at", store)
    assert checked.exit_code == 0, checked.output


def call_offline(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_pausing_a_job_makes_its_last_step_durable(cluster):
    store = cluster.folder / "kept"
    saving = f'[checkpoint]\nuri = "{store}"\nmemory_every = 10\npersist_every = 100000\n'
    cluster.begin("a", "b", job=JOB + saving)
    cluster.wait_steps(3)
    assert call(cluster.head, "pause", "j").exit_code == 0
    wait_until(lambda: cluster.head.ask("GET", "/v1/jobs/j")[1]["state"] == "paused",
               within_s=WITHIN_S)  # fmt: skip
    assert durable(cluster) == max(cluster.count())
