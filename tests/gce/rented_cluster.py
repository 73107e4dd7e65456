"""A fake Google Cloud whose machines are real agents that train, and a sailord that rents them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.cloud.notices import PREEMPTED
from agents.daemon.process_cleanup import kill_all, mark
from agents.protocol.codec import decode
from agents.protocol.store_keys import Keys
from agents.store.factory import open_store
from sailord.capacity.core.model import CapacityRecord
from sailord.client import Client
from sailord.local.paths import LocalFolders
from tests.fakes.gce.cloud import Cloud, Group, Hooks, Offer, Vm
from tests.fakes.gce.server import gce_server
from tests.fakes.google_identity import GoogleIdentity
from tests.fakes.metadata import Metadata, metadata_server
from tests.sailord.providers.emulated_cluster import agent_text, wait_until

HERE, THERE = "us-central1-a", "us-central1-b"
LARGE = "emulated-large"
NOTICE_S = 30.0


class MetadataServers:
    """A metadata server for each machine, all of them in one thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open = contextlib.AsyncExitStack()

    def start(self) -> Metadata:
        """Serve one machine."""
        return self._wait(self._open.enter_async_context(metadata_server()))

    def flip(self, server: Metadata) -> None:
        """Set its preemption flag."""
        self._wait(server.flip(PREEMPTED, "TRUE"))

    def close(self) -> None:
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        await self._open.aclose()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


@dataclass(eq=False)
class Machines(Hooks):
    """The cloud's machines as agents on this machine."""

    place: LocalFolders
    notice_s: float = NOTICE_S
    lease_s: float = 2.0
    google: GoogleIdentity = field(default_factory=GoogleIdentity)
    agents_come: bool = True
    """Whether instances boot with an agent."""
    servers: MetadataServers = field(default_factory=MetadataServers)
    metadata: dict[str, Metadata] = field(default_factory=dict)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def booted(self, vm: Vm) -> None:
        if not self.agents_come:
            return
        folder = self.place.folder / vm.name
        folder.mkdir()
        tls = write_tls(vm, folder) if self.place.tls else ""
        config = folder / "agent.toml"
        config.write_text(
            f'name = "{vm.name}"\nzone = "{vm.zone}"\nmachine = "{vm.machine}"\n'
            f"spot = true\nnotice_s = {self.notice_s}\n"
            f"{agent_text(self.place, self.place.memory, self.lease_s)}{tls}"
        )
        words = ["agents.main", "run", "--config", str(config)]
        # Without its GPU it is like this host: the agent finds no driver and ends.
        words += ["--emulate", f"1x{LARGE}"] if vm.has_gpu else []
        server = self.metadata[vm.name] = self.servers.start()
        server.prove = lambda audience: self.google.token(audience, vm.name, str(vm.id))
        with (folder / "agent.log").open("ab") as log:
            self.agents[vm.name] = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **mark(folder), "GCE_METADATA_HOST": server.address},
            )  # fmt: skip

    def warned(self, vm: Vm, seconds: float) -> None:
        assert seconds >= self.notice_s, "the agents' file says how long a notice is"
        self.servers.flip(self.metadata[vm.name])

    def ended(self, vm: Vm) -> None:
        agent = self.agents.pop(vm.name, None)
        if agent is not None:
            kill_all(self.place.folder / vm.name)
            agent.wait()


def write_tls(vm: Vm, folder: Path) -> str:
    """Write the authority's certificate as the start-up script does; return its ``[tls]``."""
    script = vm.metadata["startup-script"]
    section = re.search(r"^\[tls\]\n(?:\w+ = .*\n)+", script, re.MULTILINE)
    ca = re.search(r"cat >/etc/sailor/ca.pem <<'END'\n(.*?)END\n", script, re.DOTALL)
    assert section is not None
    assert ca is not None
    (folder / "ca.pem").write_text(ca[1])
    return section[0]


@dataclass(eq=False)
class RentedCluster:
    """A test's view of a cluster that rents its machines."""

    place: LocalFolders
    cloud: Cloud
    machines: Machines
    client: Client
    head: subprocess.Popen[bytes] | None = None

    def start_head(self) -> None:
        """Start sailord; no other one may be running."""
        words = ["sailord.main", "run", "--config", str(self.place.folder / "sailord.toml")]
        with (self.place.folder / "sailord.log").open("ab") as log:
            self.head = subprocess.Popen(
                [sys.executable, "-m", *words], stdout=log, stderr=log, start_new_session=True
            )

    def kill_head(self) -> None:
        """Kill sailord."""
        assert self.head is not None
        self.head.kill()
        self.head.wait(20)

    def submit(self) -> None:
        """Submit the example job, which uses all machines that it can get."""
        wait_until(lambda: self.client.ask("GET", "/readyz"))
        self.client.ask("POST", "/v1/jobs", {"job": self.place.job("job.toml"), "id": "tale"})

    def job(self) -> dict[str, Any]:
        return self.client.ask("GET", "/v1/status")["job"] or {}

    def trains_on(self, count: int) -> bool:
        """Return whether the job makes steps on this number of existing machines."""
        names = {vm.name for vm in self.cloud.there()}
        job = self.job()
        # A head that has just started has not read its job yet.
        is_training = bool(job) and job["step"] > 3
        return is_training and len(names.intersection(job["members"])) == count

    def wait_for_steps(self, count: int = 3) -> None:
        """Return when the job has done some more steps."""
        before = self.job()["step"]
        wait_until(lambda: self.job()["step"] > before + count)

    def said(self, words: str) -> list[str]:
        """Return the lines of sailord's log that contain some words."""
        lines = (self.place.folder / "sailord.log").read_text().splitlines(keepends=True)
        return [line for line in lines if words in line]

    def history(self) -> list[str]:
        """Return the job's history as texts."""
        return [e["text"] for e in self.client.ask("GET", "/v1/events?follow=false")["events"]]

    def end_job(self) -> CapacityRecord:
        """Cancel the job, and return the stored state once every machine is deleted."""
        self.client.ask("POST", "/v1/jobs/tale/cancel", {})
        wait_until(lambda: not self.cloud.there())
        assert self.cloud.disks() == []
        assert self.machines.agents == {}

        def closed() -> CapacityRecord | None:
            books = read_books(self.place)
            return None if books.machines or books.asks else books

        return wait_until(closed)


def read_books(place: LocalFolders) -> CapacityRecord:
    """Return the stored state of machines and cost, as the next leader would read it."""

    async def read() -> CapacityRecord:
        store = await open_store(f"unix://{place.folder}/head/store.sock")
        try:
            entry = await store.get(Keys("local").capacity)
        finally:
            await store.close()
        assert entry is not None
        return decode(CapacityRecord, entry.value)

    return asyncio.run(read())


@contextlib.contextmanager
def rented_cluster(
    folder: Path,
    capacity: str,
    notice_s: float = NOTICE_S,
    groups: Sequence[Group] = (),
    lease_s: float = 2.0,
    *,
    tls: bool = False,
    agents_come: bool = True,
) -> Iterator[RentedCluster]:
    """A cloud with two zones and one machine type, and a sailord that may rent from it.

    ``capacity`` is that table of sailord's file. With ``tls`` sailord signs the instances'
    certificates. Nothing outlives it.
    """
    place = LocalFolders(
        folder, memory_gib=1.455, tls=tls
    )  # So that two instances can train the model.
    place.make()
    machines = Machines(place, notice_s, lease_s, agents_come=agents_come)
    cloud = Cloud(
        hooks=machines,
        offers={LARGE: Offer("nvidia-tesla-a100", 1, "NVIDIA_A100_GPUS", 2.0, 0.8)},
        groups={group.name: group for group in groups},
    )
    try:
        with gce_server(cloud) as address:
            configure(place, address, capacity, groups)
            life = RentedCluster(place, cloud, machines, Client(f"unix://{place.socket}"))
            life.start_head()
            try:
                yield life
            except BaseException:
                print("".join(life.said('"capacity')[-60:]))
                raise
            finally:
                assert life.head is not None
                life.head.terminate()
                life.head.wait(20)
                for vm in cloud.vms:
                    machines.ended(vm)
    finally:
        machines.servers.close()
        place.remove()


def configure(
    place: LocalFolders, address: str, capacity: str, groups: Sequence[Group] = ()
) -> None:
    """Write the files of a sailord that rents from the cloud at an address."""
    catalogue = place.folder / "catalogue.toml"
    text = catalogue.read_text()
    catalogue.write_text(
        text.replace('zones = ["zone-a", "zone-b", "zone-c"]', f'zones = ["{HERE}", "{THERE}"]')
        .replace("[region.emulated]", "[region.us-central1]")
        .replace(".emulated]\n", ".us-central1]\n")
    )
    GoogleIdentity().write_keys(place.folder / "google.jwks")
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
            f'machines = ["{LARGE}"]\nstore = "etcd://10.0.0.1:2379?ca=/etc/sailor/ca.pem"\n'
            'key_secret = "projects/test-project/secrets/key/versions/1"\n'
            'service_account = "default"\n'
            f'identity_keys = "{place.folder}/google.jwks"\n'
            f'endpoint = "{address}"\ncall_s = 5\noperation_s = 4\npoll_s = 0.05\n'
        )
        for group in groups:
            config.write(
                f'[[provider.group]]\nzone = "{group.zone}"\nmachine = "{LARGE}"\n'
                f'name = "{group.name}"\n'
            )
        if "usd_" not in capacity:
            capacity += "usd_per_hour_max = 1000.0\n"
        config.write(f"[capacity.testing]\nlook_s = 0.5\nmachines_per_pool_max = 4\n{capacity}")
