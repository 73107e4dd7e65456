"""Webhook receivers get each kind of event when it happens."""

from __future__ import annotations

import pytest

from tests.control.cluster import JOB, Cluster
from tests.processes import wait_until
from tests.sailord.daemon.running import Place
from tests.sailord.daemon.test_webhook_sender import SECRET, Receiver

CHECKPOINTS = '\n[checkpoint]\nuri = "kept"\nmemory_every = 10\npersist_every = 20\n'
NO_BUDGET = "\n[objective]\nmax_usd_total = 0.000001\n"


@pytest.fixture(scope="module")
def delivered(tmp_path_factory):
    """The events that a receiver got of two jobs, by kind."""
    folder, receiver = tmp_path_factory.mktemp("told"), Receiver()
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    webhooks = f'[[webhooks.receiver]]\nurl = "{receiver.url}"\nsecret_file = "secret"\n'
    webhooks += f'[telemetry]\notlp = "{receiver.url}"\n'
    cluster = Cluster(folder, [Place(folder, webhooks=webhooks)])
    found = {}

    def wait_for_event(kind: str, **about: object) -> None:
        def matching_event():
            wanted = {"kind": kind, **about}.items()
            return next((each for each in list(receiver.taken) if wanted <= each.items()), None)

        found[kind] = wait_until(matching_event, within_s=90.0)

    try:
        cluster.begin("a", "b", job=JOB + CHECKPOINTS.replace("kept", str(folder / "kept")))
        wait_for_event("generation_opened", job="j", generation=1)
        wait_for_event("generation_running", job="j", generation=1)
        wait_for_event("checkpoint_committed", job="j")
        assert cluster.head.ask("POST", "/v1/nodes/b/preempt", {"leaves_at": 3e9})[0] == 202
        wait_for_event("node_preempted")
        assert cluster.head.ask("POST", "/v1/jobs/j/cancel", {"reason": "enough"})[0] == 202
        wait_for_event("job_finished")
        assert (
            cluster.head.ask("POST", "/v1/jobs", {"job": JOB + NO_BUDGET, "id": "poor"})[0] == 201
        )
        wait_for_event("job_held")
        ends = JOB.replace("[training]", "[training]\nsteps = 100", 1) + NO_BUDGET
        code, found["submitted"] = cluster.head.ask("POST", "/v1/jobs", {"job": ends, "id": "next"})
        assert code == 201
        found["traces"] = wait_until(lambda: list(receiver.traces), within_s=90.0)
        yield found
    finally:
        cluster.end()
        receiver.shutdown()
        receiver.server_close()


def test_too_small_budget_is_warned_of_at_submission(delivered):
    assert "max_usd_total: " in delivered["submitted"]["warnings"][-1]


def test_opentelemetry_collector_gets_the_start_of_a_job(delivered):
    # These workers count steps and measure no phases of their own.
    (resource,) = delivered["traces"][0]["resourceSpans"]
    whole, *parts = resource["scopeSpans"][0]["spans"]
    assert whole["name"] == "reconfiguration"
    assert [part["name"] for part in parts] == ["detect", "plan", "quiesce", "move"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "about", "text"),
    [
        ("generation_opened", {"job": "j", "generation": 1}, "generation 1 is open: "),
        ("generation_running", {"job": "j", "generation": 1}, "generation 1 runs"),
        ("checkpoint_committed", {"job": "j", "generation": 1}, " is durable"),
        ("node_preempted", {"node": "b"}, "b is draining"),
        ("job_finished", {"job": "j", "generation": None}, "cancelled: "),
        ("job_held", {"job": "poor", "generation": None}, "0.00"),
    ],
)
def test_webhook_receiver_gets_the_events_of_a_job(delivered, kind, about, text):
    message = delivered[kind]
    assert text in message["text"], message
    assert about.items() <= message.items()
    assert set(message) == {
        "id", "at", "kind", "text", "job", "node", "generation", "step", "term", "is_detail",
        "order", "settled",
    }  # fmt: skip
