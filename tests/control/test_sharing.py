"""Two jobs share a cluster of real processes: each has nodes of its own, and gains the other's."""

from __future__ import annotations

import pytest

from tests.control.cluster import JOB, Cluster, restart
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

pytestmark = pytest.mark.slow
SAVED = f'{JOB}\n[checkpoint]\nuri = "file://{{}}/kept"\nmemory_every = 50\npersist_every = 100\n'


@pytest.fixture
def shared(tmp_path):
    """One sailord whose jobs share."""
    made = Cluster(tmp_path, [Place(tmp_path, options="share = true\n")], agents_lease_s=10.0)
    yield made
    made.end()


def test_two_jobs_train_side_by_side_and_the_last_one_gets_all_nodes(shared):
    head, text = shared.head, SAVED.format(shared.folder)
    shared.begin("a", "b", "c", "d", job=text)
    code, said = head.ask("POST", "/v1/jobs", {"job": text, "id": "k", "weight": 0})
    assert code == 422, said
    code, said = head.ask("POST", "/v1/jobs", {"job": text, "id": "k", "weight": 0.9})
    assert code == 201, said
    assert said["weight"] == 0.9
    wait_until(lambda: trains(head, "j") and trains(head, "k"))
    parts = {each["id"]: each["nodes"] for each in head.status()["running"]}
    assert sorted(parts["j"] + parts["k"]) == ["a", "b", "c", "d"]
    assert len(parts["k"]) == 2
    assert members(head, "j") == parts["j"]
    assert members(head, "k") == parts["k"]

    for name in "jk":
        code, said = head.ask("GET", f"/v1/status?job={name}")
        assert (code, said["job"]["id"]) == (200, name)
        assert said["job"]["members"] == parts[name]

    # A new leader finds in the store whose each node is, and nobody moves.
    before = generation(head, "j"), generation(head, "k")
    restart(head, head.processes[0])
    wait_until(lambda: trains(head, "j") and trains(head, "k"))
    assert {each["id"]: each["nodes"] for each in head.status()["running"]} == parts
    assert (generation(head, "j"), generation(head, "k")) == before

    # The loss of a node ends the generation of one job.
    wait_until(lambda: head.ask("GET", "/v1/jobs/k")[1]["durable"])
    before = generation(head, "j")
    lost = shared.agents.pop(parts["k"][0])
    lost.kill_node()
    wait_until(lambda: trains(head, "k") and members(head, "k") == parts["k"][1:])
    assert generation(head, "j") == before
    assert members(head, "j") == parts["j"]

    # A job that ends gives its nodes to the other.
    code, said = head.ask("POST", "/v1/jobs/k/cancel")
    assert code == 202, said
    rest = sorted([*parts["j"], parts["k"][1]])
    wait_until(lambda: members(head, "j") == rest)
    wait_until(shared.is_running)
    assert head.status()["running"] == []
    opened = [line for line in shared.history() if line.startswith("generation ")]
    assert all("0 steps lost" in line for line in opened if "(memory" in line), opened
    assert len(opened) >= 3, opened


def trains(head, id_):
    """Return whether a job runs beside others, and has done a step.

    Meanwhile a better plan may be looked for.
    """
    rows = {each["id"]: each for each in head.status()["running"]}
    return id_ in rows and rows[id_]["phase"] in ("running", "planning") and rows[id_]["step"] > 0


def generation(head, id_):
    return head.ask("GET", f"/v1/jobs/{id_}")[1]["generation"]["number"]


def members(head, id_):
    """Return the names of the nodes of a job's generation."""
    found = head.ask("GET", f"/v1/jobs/{id_}")[1]["generation"]
    return sorted(id_.partition(".")[0] for id_ in found["members"])
