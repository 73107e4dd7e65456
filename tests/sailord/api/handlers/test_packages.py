"""Packed work folders are uploaded in parts, checked, and read by agents alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.records import JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.signing import ClusterKey
from agents.work.package import BYTES_MAX, PART_BYTES, Package
from sailord.api.handlers.context import PACKAGE_KEPT_S, ApiContext
from sailord.api.handlers.packages import delete_unused
from sailord.checkpoints.object_storage import Storage, open_storage
from sailord.client import Client, ServerProblem
from simulator.models.families import build_model
from simulator.spec.job import Job
from tests.processes import wait_until
from worker.script.job_text import job_text


@pytest.fixture
def client(head):
    return Client(f"unix://{head.socket}")


def package_of(content: bytes) -> Package:
    return Package(hashlib.sha256(content).hexdigest(), len(content))


def submit(client: Client, package: Package) -> None:
    job = Job("small", build_model("gpt2", layers=2, hidden=8, heads=2), 8, 8)
    text = job_text(job, Path("train.py")) + f'\n[work]\npackage = "{package}"\n'
    client.ask("POST", "/v1/jobs", {"job": text, "id": f"job-{package.sha256[:8]}"})


async def fetched(head, key: bytes, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session:
        signed = SignedClient(session, ClusterKey("test", (key,)))
        return await signed.call(f"127.0.0.1:{head.port}", "GET", path, to="sailord")


@pytest.mark.slow
async def test_a_package_is_uploaded_once_and_read_by_agents(head, client):
    content = os.urandom(PART_BYTES + 7)
    package = package_of(content)
    place = f"/v1/packages/{package}"
    assert client.ask("GET", place)["missing"] == [0, 1]
    with pytest.raises(ServerProblem, match="was not uploaded here"):
        submit(client, package)
    client.ask("PUT", f"{place}/1", content[PART_BYTES:])
    assert client.ask("GET", place)["missing"] == [0]
    client.ask("PUT", f"{place}/0", content[:PART_BYTES])
    client.ask("PUT", f"{place}/0", content[:PART_BYTES])
    assert client.ask("GET", place)["missing"] == []
    submit(client, package)
    key = head.key.read_bytes()
    read = [await fetched(head, key, f"{place}/{part}") for part in (0, 1, 2)]
    assert [status for status, _ in read] == [200, 200, 404]
    assert read[0][1] + read[1][1] == content
    with pytest.raises(CallFailed):
        await fetched(head, b"x" * 64, f"{place}/0")
    client.ask("POST", f"/v1/jobs/job-{package.sha256[:8]}/cancel", {})


def test_package_of_another_submission_under_way_is_not_deleted(client):
    contents = [os.urandom(9) for _ in range(2)]
    first, other = (package_of(content) for content in contents)
    for package, content in zip((first, other), contents, strict=True):
        client.ask("PUT", f"/v1/packages/{package}/0", content)
    submit(client, first)
    assert client.ask("GET", f"/v1/packages/{other}")["missing"] == []
    submit(client, other)
    cancel(client, first)
    cancel(client, other)


async def test_leader_deletes_packages_that_no_job_needs(tmp_path, monkeypatch):
    storage = open_storage(f"file://{tmp_path}")
    names = [str(package_of(bytes([number]))) for number in range(4)]
    for name in names:
        storage.write(f"{name}/0000", b"x")
    monkeypatch.setattr(ApiContext, "__post_init__", lambda _: None)
    about: dict[str, Any] = dict.fromkeys(("config", "clock", "key", "network", "goodput"))
    jobs = {
        JobId(state): JobRecord(JobId(state), state, layers=1, atoms=1)
        for state in ("running", "done")
    }
    specs = {JobId("running"): names[0], JobId("done"): names[1]}

    async def read_spec(id_: JobId) -> str:
        return f'[work]\npackage = "{specs[id_]}"\n'

    state: Any = SimpleNamespace(term=None, jobs=jobs)
    gateway: Any = SimpleNamespace(
        read_spec=read_spec, keys=Keys("c"), unreadable=UnreadableRecords()
    )
    store = SimpleNamespace(is_available=True)
    cluster: Any = SimpleNamespace(state=state, last_led=state, store=store)
    api = ApiContext(cluster=cluster, own_gateway=gateway, **about)
    api.use_package(names[2])
    await delete_unused(api, storage, names[3])
    assert kept(storage) == set(names), "who does not lead does not know all jobs"
    state.term = 1
    gateway.unreadable.found = {gateway.keys.generation(JobId("other")): "is of a newer version"}
    await delete_unused(api, storage, names[3])
    assert kept(storage) == set(names), "the job of the record may need any of them"
    gateway.unreadable.found = {}
    specs[JobId("running")] = 'no name"\nof = a package'
    await delete_unused(api, storage, names[3])
    assert kept(storage) == set(names), "what the job needs cannot be read"
    specs[JobId("running")] = names[0]
    await delete_unused(api, storage, names[3])
    assert kept(storage) == set(names) - {names[1]}
    api.packages_used_s[names[2]] -= PACKAGE_KEPT_S
    await delete_unused(api, storage, names[0])
    assert kept(storage) == {names[0]}
    assert names[2] not in api.packages_used_s


def kept(storage: Storage) -> set[str]:
    return {entry.name.partition("/")[0] for entry in storage.entries("")}


def cancel(client: Client, package: Package) -> None:
    place = f"/v1/jobs/job-{package.sha256[:8]}"
    client.ask("POST", f"{place}/cancel", {})
    wait_until(lambda: client.ask("GET", place)["state"] == "cancelled")


def test_a_package_that_differs_from_its_name_is_refused_and_deleted(client):
    package = package_of(os.urandom(9))
    client.ask("PUT", f"/v1/packages/{package}/0", b"something")
    with pytest.raises(ServerProblem, match="differs from its name"):
        submit(client, package)
    assert client.ask("GET", f"/v1/packages/{package}")["missing"] == [0]


def test_a_part_is_not_replaced_by_other_content(client):
    content = os.urandom(9)
    package = package_of(content)
    client.ask("PUT", f"/v1/packages/{package}/0", content)
    with pytest.raises(ServerProblem, match="is stored with other content") as refused:
        client.ask("PUT", f"/v1/packages/{package}/0", b"something")
    assert refused.value.status == 409
    submit(client, package)
    cancel(client, package)


@pytest.mark.parametrize("part", ["0", "1", "99999", "x", "-1"])
def test_a_part_of_another_size_or_number_is_refused(part, client):
    with pytest.raises(ServerProblem) as refused:
        client.ask("PUT", f"/v1/packages/{package_of(b'123')}/{part}", b"1234")
    assert refused.value.status in (404, 422)


@pytest.mark.parametrize("name", ["x", "..%2f..", "0" * 64, f"{'0' * 64}-{BYTES_MAX + 1}"])
def test_invalid_package_name_is_not_found(name, client):
    with pytest.raises(ServerProblem) as refused:
        client.ask("GET", f"/v1/packages/{name}")
    assert refused.value.status == 404
