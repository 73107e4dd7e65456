"""The story, end to end: a fake Google Cloud, a real sailord, real agents that train (``gce``)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from agents.keys import Keys
from agents.store import open_store
from agents.wire import decode
from sailord.capacity_model import Books
from sailord.client import Client
from sailord.local.place import Place
from sailord.local.sweep import end_all, mark_of
from tests.fakes.gce.cloud import Cloud, Hooks, Offer, Vm
from tests.fakes.gce.server import gce_server
from tests.gce.test_gce_emulated import agent_text, wait_until

HERE, THERE = "us-central1-a", "us-central1-b"
LARGE = "emulated-large"


@dataclass(eq=False)
class Machines(Hooks):
    """The cloud's machines as agents on this machine."""

    place: Place
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    warnings: dict[str, float] = field(default_factory=dict)

    def booted(self, vm: Vm) -> None:
        folder = self.place.folder / vm.name
        folder.mkdir()
        config = folder / "agent.toml"
        config.write_text(
            f'name = "{vm.name}"\nzone = "{vm.zone}"\nmachine = "{vm.machine}"\n'
            f"spot = true\n{agent_text(self.place, self.place.memory)}"
        )
        words = ["agents.service", "run", "--config", str(config), "--emulate", f"1x{LARGE}"]
        with (folder / "agent.log").open("ab") as log:
            self.agents[vm.name] = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **mark_of(folder), "GCE_METADATA_HOST": "127.0.0.1:9"},
            )  # fmt: skip

    def warned(self, vm: Vm, seconds: float) -> None:
        self.warnings[vm.name] = time.time() + seconds

    def ended(self, vm: Vm) -> None:
        agent = self.agents.pop(vm.name, None)
        if agent is not None:
            end_all(self.place.folder / vm.name)
            agent.wait()


@pytest.fixture
def place(tmp_path_factory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("story") / "c")
    place.make()
    yield place
    place.remove()


def configure(place: Place, address: str) -> None:
    catalogue = place.folder / "catalogue.toml"
    text = catalogue.read_text()
    catalogue.write_text(
        text.replace('zones = ["zone-a", "zone-b", "zone-c"]', f'zones = ["{HERE}", "{THERE}"]')
        .replace("[region.emulated]", "[region.us-central1]")
        .replace(".emulated]\n", ".us-central1]\n")
    )
    (place.folder / "cluster.toml").write_text(
        'catalogue = "catalogue.toml"\n'
        + "".join(
            f'[[pool]]\nzone = "{zone}"\nmachine = "{LARGE}"\nmachines = 0\nobtainable = 4\n'
            "spot = true\n"
            for zone in (HERE, THERE)
        )
    )
    with (place.folder / "sailord.toml").open("a") as config:
        config.write(
            f'[provider]\nkind = "gce"\nproject = "test-project"\nzones = ["{HERE}", "{THERE}"]\n'
            f'machines = ["{LARGE}"]\nstore = "etcd://10.0.0.1:2379"\n'
            'key_secret = "projects/test-project/secrets/key/versions/1"\n'
            f'endpoint = "{address}"\npoll_s = 0.05\n'
            "[capacity]\nlook_s = 0.5\nsurplus_s = 8.0\nlost_s = 3.0\ndelete_again_s = 3.0\n"
            "stockout_s = 3.0\nrest_max_s = 6.0\nmachines_per_pool_max = 4\n"
        )


def test_gce_the_story_of_a_preemption_a_stockout_and_a_replacement_elsewhere(place):
    machines = Machines(place)
    cloud = Cloud(hooks=machines, offers={LARGE: Offer("nvidia-tesla-a100", 1, "", 2.0, 0.8)})
    cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 2}
    with gce_server(cloud) as address:
        configure(place, address)
        words = ["sailord.service", "run", "--config", str(place.folder / "sailord.toml")]
        with (place.folder / "sailord.log").open("ab") as log:
            head = subprocess.Popen(
                [sys.executable, "-m", *words], stdout=log, stderr=log, start_new_session=True
            )
        try:
            _tell(place, cloud, machines)
        finally:
            head.terminate()
            head.wait(20)
            for vm in cloud.vms:
                machines.ended(vm)


def read_books(place: Place) -> Books:
    async def read() -> Books:
        store = await open_store(f"unix://{place.folder}/head/store.sock")
        try:
            entry = await store.get(Keys("local").capacity)
        finally:
            await store.close()
        assert entry is not None
        return decode(Books, entry.value)

    return asyncio.run(read())


def _tell(place: Place, cloud: Cloud, machines: Machines) -> None:
    client = Client(f"unix://{place.socket}")
    wait_until(lambda: client.ask("GET", "/readyz"))
    client.ask("POST", "/v1/jobs", {"job": place.job("job.toml"), "id": "tale"})

    def step() -> int:
        found: int = client.ask("GET", "/v1/status")["job"]["step"]
        return found

    wait_until(lambda: len(cloud.there()) == 4)
    wait_until(lambda: len(machines.agents) == 4 and step() > 3)
    assert {vm.zone for vm in cloud.there()} == {HERE, THERE}

    cloud.stock = {(HERE, LARGE, True): 0, (THERE, LARGE, True): 1}
    taken = next(vm for vm in cloud.there() if vm.zone == HERE)
    cloud.preempt(taken.name, notice_s=15.0)
    warned = {"leaves_at": time.time() + 15.0}
    client.ask("POST", f"/v1/nodes/{taken.name}/preempt", warned)
    wait_until(lambda: taken.name not in machines.agents)
    wait_until(lambda: len([vm for vm in cloud.there() if vm.zone == THERE]) == 3)
    before = step()
    wait_until(lambda: step() > before + 3)
    events = client.ask("GET", "/v1/events?follow=false")["events"]
    lost = [e["text"] for e in events if "steps lost" in e["text"]]
    assert lost, "generations are told with what they lost"
    assert all("0 steps lost" in text for text in lost), lost

    client.ask("POST", "/v1/jobs/tale/cancel", {})
    wait_until(lambda: not cloud.there())
    wait_until(lambda: cloud.running_operations() == [])
    books = wait_until(lambda: (b := read_books(place)) and not (b.machines or b.asks) and b)
    assert books.spent_usd == pytest.approx(cloud.bill(), rel=0.01)
    assert machines.agents == {}
