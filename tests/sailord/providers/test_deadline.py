"""A real sailord keeps a job's deadline: on-demand instances are rented in time and given back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from sailord.client import Client
from sailord.local.paths import LocalFolders
from tests.sailord.providers.emulated_cluster import cards, traced_sailord, wait_until

STEPS = 30
"""A step is predicted to take 4.6 s, and takes a fraction of that on most computers."""
DEADLINE_S = 400.0
TRACE_FILE = """
end_s = 10000
[[event]]
time_s = 0
zone = "zone-c"
machines = 0
"""
CONFIG = """
[provider]
kind = "trace"
trace = "TRACE"
speed = 1.0
folder = "machines"
agent = "agent-base.toml"
[[provider.pool]]
zone = "zone-a"
machine = "emulated-large"
usd_per_hour = 2.0
machines_max = 1
[[provider.pool]]
zone = "zone-c"
machine = "emulated-small"
spot = true
usd_per_hour = 0.4
machines_max = 1
[capacity.testing]
look_s = 0.5
boot_s = 60.0
surplus_s = 2.0
delete_again_s = 2.0
rest_max_s = 4.0
"""


@pytest.fixture
def place(tmp_path_factory) -> Iterator[LocalFolders]:
    with traced_sailord(tmp_path_factory.mktemp("due"), CONFIG, TRACE_FILE) as place:
        yield place


@pytest.mark.slow
def test_a_job_starved_of_spot_buys_on_demand_meets_its_deadline_and_gives_it_back(place):
    client = Client(f"unix://{place.socket}")
    wait_until(lambda: client.ask("GET", "/readyz"))
    due = datetime.now(UTC) + timedelta(seconds=DEADLINE_S)
    text = place.job("job.toml").replace("[training]", f"[training]\nsteps = {STEPS}")
    text += f'\n[objective]\ngoal = "cost"\ndeadline = "{due:%Y-%m-%dT%H:%M:%SZ}"\n'
    told = client.ask("POST", "/v1/jobs", {"job": text, "id": "due"})["warnings"]
    assert not any("cannot be met" in each for each in told), told
    ask_why = partial(client.ask, "GET", "/v1/jobs/due/why")
    why = wait_until(lambda: ask_why()["deadline"], within_s=DEADLINE_S)
    # A computer so slow that it plans for minutes has no time left to wait.
    assert "waits for spot instances" in why or "to spare: renting 1 on-demand" in why, why
    assert cards(place) == [] or "waits" not in why, "there is time to spare"
    (bought,) = wait_until(lambda: cards(place), within_s=DEADLINE_S)
    assert bought["pool"]["zone"] == "zone-a", bought
    why = ask_why()["deadline"]
    assert "1 on-demand emulated-large" in why
    wait_until(lambda: client.ask("GET", "/v1/jobs/due")["state"] == "done", within_s=DEADLINE_S)
    assert datetime.now(UTC) <= due
    told = [line["text"] for line in client.ask("GET", "/v1/jobs/due/history")["history"]]
    assert any("1 on-demand emulated-large" in text for text in told), told
    wait_until(lambda: not cards(place))
