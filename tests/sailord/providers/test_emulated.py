"""A real sailord rents emulated instances: agents on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from agents.daemon.process_cleanup import kill_all
from agents.protocol.codec import decode
from sailord.api.handlers.capacity import CapacityView
from sailord.cli.main import main
from sailord.client import Client
from sailord.local.paths import LocalFolders
from sailord.providers.emulated import CARD, EmulatedProvider
from sailord.providers.interface import Observation, Pool
from tests.sailord.providers.emulated_cluster import cards, renting_sailord, wait_until

NO_PID = 2**30
PRICES = {"zone-a": 1.0, "zone-b": 2.0}
POOLS = "".join(
    f'[[provider.pool]]\nzone = "{zone}"\nmachine = "emulated-large"\n'
    f'gpu = "emulated-large"\nspot = true\nusd_per_hour = {usd}\nmachines_max = 1\n'
    for zone, usd in PRICES.items()
)
CONFIG = f"""
[provider]
kind = "emulated"
folder = "machines"
agent = "agent-base.toml"
{POOLS}
[capacity.testing]
look_s = 0.5
surplus_s = 2.0
lost_s = 2.0
delete_again_s = 2.0
"""


@pytest.fixture
def place(tmp_path_factory) -> Iterator[LocalFolders]:
    with renting_sailord(tmp_path_factory.mktemp("gce") / "c", CONFIG) as place:
        yield place


def _look_at_capacity(client: Client, place: LocalFolders) -> None:
    """The API and the commands show the instances."""
    value = wait_until(
        lambda: (
            (v := client.ask("GET", "/v1/capacity"))
            and any(m["state"] == "up" and m["in_use"] for m in v["machines"])
            and v
        )
    )
    view = decode(CapacityView, json.dumps(value))
    assert view.provider == "emulated"
    assert {(p.zone, p.usd_per_hour) for p in view.pools} == set(PRICES.items())
    assert view.strangers == view.orphans == ()
    assert client.ask("GET", "/v1/status")["capacity"]["up"] == sum(p.up for p in view.pools)
    assert 'sailor_machines{machine="emulated-large",' in client.ask("GET", "/metrics")
    words = ["capacity", "--server", f"unix://{place.socket}"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "emulated-large" in done.output


@pytest.mark.slow
def test_instances_are_rented_for_a_job_replaced_and_deleted_after_it(place):
    client = Client(f"unix://{place.socket}")
    wait_until(lambda: client.ask("GET", "/readyz"))
    assert cards(place) == [], "no machine is requested without a job"
    client.ask("POST", "/v1/jobs", {"job": place.job("job.toml"), "id": "tale"})
    first = wait_until(lambda: cards(place))
    assert len({card["request_id"] for card in first}) == len(first)

    def step() -> int:
        return client.ask("GET", "/v1/status")["job"]["step"]

    wait_until(lambda: step() > 3)
    _look_at_capacity(client, place)
    # A silent death: kill the emulated machine's process with all its children.
    gone = cards(place)[0]
    os.kill(gone["pid"], signal.SIGKILL)
    kill_all(place.folder / "machines" / gone["id"])
    wait_until(lambda: cards(place) and gone["id"] not in {card["id"] for card in cards(place)})
    before = step()
    wait_until(lambda: step() > before + 3)
    client.ask("POST", "/v1/jobs/tale/cancel", {})
    wait_until(lambda: not cards(place))
    wait_until(lambda: not list((place.folder / "machines").glob("*/")))


def test_when_an_instance_ended_is_known_after_a_restart(tmp_path):
    def observed(at: float) -> Observation:
        return asyncio.run(EmulatedProvider(tmp_path, "", (), lambda: at).observe())

    (tmp_path / "i").mkdir()
    pool = asdict(Pool("zone-a", "large", "gpu", 4, spot=True))
    card = {"id": "i", "name": "m-i", "pool": pool, "created_at": 1.0, "request_id": "r"}
    (tmp_path / "i" / CARD).write_text(json.dumps(card | {"pid": NO_PID}))
    first = observed(7.0)
    assert (first.instances, first.ended_at) == ((), {"i": 7.0})
    assert observed(9.0).ended_at == {"i": 7.0}
    (tmp_path / "ended.json").write_text("{")
    assert observed(9.0).ended_at == {}
