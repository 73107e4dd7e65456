"""A real sailord rents emulated instances: agents on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agents.daemon.process_cleanup import kill_all
from agents.protocol.codec import decode
from sailord.api.capacity import CapacityView
from sailord.cli.main import main
from sailord.client import Client, ServerProblem
from sailord.local.paths import Place

PRICES = {"zone-a": 1.0, "zone-b": 2.0}


def agent_text(place: Place, memory: Path) -> str:
    return (
        f'cluster_name = "local"\nstate = "."\nkey = "{place.folder}/key"\n'
        f'store = "unix://{place.folder}/head/store.sock"\n'
        f'catalogue = "{place.folder}/catalogue.toml"\nworker = "worker.control.worker_process"\n'
        f'memory = "{memory}"\nthreads = 1\nlease_s = 2.0\norphan_s = 10.0\n[listen]\nport = 0\n'
    )


def pools_text() -> str:
    return "".join(
        f'[[provider.pool]]\nzone = "{zone}"\nmachine = "emulated-large"\n'
        f'gpu = "emulated-large"\nspot = true\nusd_per_hour = {usd}\nmachines_max = 1\n'
        for zone, usd in PRICES.items()
    )


@pytest.fixture
def place(tmp_path_factory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("gce") / "c")
    place.make()
    (place.folder / "agent-base.toml").write_text(agent_text(place, place.memory))
    with (place.folder / "sailord.toml").open("a") as config:
        config.write(
            '[provider]\nkind = "emulated"\nfolder = "machines"\nagent = "agent-base.toml"\n'
            f"{pools_text()}"
            "[capacity]\nlook_s = 0.5\nsurplus_s = 2.0\nlost_s = 2.0\ndelete_again_s = 2.0\n"
            "stockout_s = 600.0\n"
        )
    words = ["sailord.main", "run", "--config", str(place.folder / "sailord.toml")]
    with (place.folder / "sailord.log").open("ab") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", *words], stdout=log, stderr=log, start_new_session=True
        )
    yield place
    head.send_signal(signal.SIGTERM)
    head.wait(20)
    for card in (place.folder / "machines").glob("*"):
        kill_all(card)
    place.remove()


def wait_until(holds: Callable[[], Any], within_s: float = 150.0) -> Any:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if value := holds():
                return value
        except ServerProblem:
            pass
        time.sleep(0.1)
    raise AssertionError("it never held")


def cards(place: Place) -> list[dict[str, Any]]:
    found = (place.folder / "machines").glob("*/instance.json")
    return [json.loads(path.read_bytes()) for path in found]


def _look_at_capacity(client: Client, place: Place) -> None:
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
    wait_until(lambda: not list((place.folder / "machines").iterdir()))
