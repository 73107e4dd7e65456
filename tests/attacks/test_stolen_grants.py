"""A thief of what a worker shows, of the cluster's key, or of both tries to read snapshots."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agents.rpc.client import scheme_of, tls_of
from agents.rpc.enrolment import worker_tls
from agents.rpc.grants import make_grant
from agents.rpc.signing import AGE_S_MAX, TICKET_S, ClusterKey, Verifier, ticket
from agents.rpc.tls import Tls, TlsFiles
from agents.snapshots.http import SnapshotRoutes
from agents.snapshots.memory import SnapshotMemory
from agents.snapshots.readers import ReadAdmission
from sailord.authority import Authority
from tests.agents.grants import reader
from tests.agents.sealing import write_snapshot
from tests.sailord.certificates import files_in, member
from worker.checkpoint.piece_sources import PeerSource, PeerTls
from worker.checkpoint.reader import GRANT_HEADER, PROOF_HEADER, TICKET_HEADER, Reader

KEY = ClusterKey("test", (b"k" * 32,))
FILE = "/v1/memory/job/1-3/0.snap"
SPAN = "bytes=0-99"


@dataclass(eq=False)
class Server:
    """The agent of a node that has a snapshot, and all headers that it was shown."""

    address: str
    tls: Tls | None
    shown: list[dict[str, str]]

    async def ask(self, headers: dict[str, str], path: str = FILE, span: str = SPAN) -> int:
        """Ask for a range of a file as anyone can who reaches the port."""
        url = URL(f"{scheme_of(self.tls)}://{self.address}{path}", encoded=True)
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                url, headers={**headers, "Range": span}, **tls_of(self.tls, "agent")
            ) as reply,
        ):
            return reply.status

    async def read(self, by: Reader) -> int:
        """Ask as the holder of a grant."""
        return await self.ask(by.headers(self.address, FILE, SPAN, at=time.time()))


@contextlib.asynccontextmanager
async def serving(
    folder: Path, own: Tls | None, stranger: Tls | None, earlier: str = ""
) -> AsyncIterator[Server]:
    """An agent; workers of the node ``earlier`` are of an earlier version."""
    write_snapshot(folder, step=3)
    write_snapshot(folder, step=3, rank=1)
    memory, shown = SnapshotMemory(folder), list[dict[str, str]]()
    memory.open()

    async def shows_tickets(name: str) -> bool:
        return name == earlier

    @web.middleware
    async def listen(request: web.Request, handler):
        shown.append({k: v for k, v in request.headers.items() if k.startswith("Sailor")})
        return await handler(request)

    app = web.Application(middlewares=[listen])
    server = Server("", stranger, shown)
    verifier = Verifier(KEY, lambda: server.address)
    SnapshotRoutes(memory, verifier, ReadAdmission(verifier, own, shows_tickets)).add_to(app.router)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        context = None if own is None else own.server
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        server.address = f"127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority.create(tmp_path / "ca", "test")


def certified(authority: Authority, name: str, role: str = "agent") -> Tls:
    return member(authority, role, name, authority.folder.parent / name)


@contextlib.asynccontextmanager
async def two_agents(
    authority: Authority, *, is_tls: bool
) -> AsyncIterator[tuple[Server, Server, Tls]]:
    """Two agents with the same snapshot, and the TLS of the reader's agent."""
    folder = authority.folder.parent
    stranger = Tls(TlsFiles(authority.folder / "ca.pem"), "test", "agent") if is_tls else None
    owns = [certified(authority, name) if is_tls else None for name in ("a", "c")]
    b = certified(authority, "b")
    async with (
        serving(folder / "memory-a", owns[0], stranger) as first,
        serving(folder / "memory-c", owns[1], stranger) as second,
    ):
        yield first, second, b


@pytest.mark.parametrize("is_tls", [True, False], ids=["TLS", "plain HTTP"])
async def test_what_a_worker_shows_reads_nothing_for_a_thief(authority, cost, is_tls):
    async with two_agents(authority, is_tls=is_tls) as (server, other, b):
        by = reader(KEY, "job", "b", tls=b if is_tls else None)
        told = worker_tls(TlsFiles(authority.folder / "ca.pem"), "test")
        tls = PeerTls.of(told) if is_tls else None
        point = {"generation": 1, "step": 3}
        source = PeerSource.at("a", server.address, by, "job", tls, **point)
        with contextlib.closing(source):
            assert len(await asyncio.to_thread(source.files)) == 2
            assert await asyncio.to_thread(source.read, "0.snap", 0, 100)
        stolen = server.shown[-1]
        assert set(stolen) == {TICKET_HEADER, GRANT_HEADER, PROOF_HEADER}

        assert await server.ask(stolen, span="bytes=0-999") == 401, "another range"
        assert await server.ask(stolen, path=FILE.replace("0.snap", "1.snap")) == 401
        assert await server.ask(stolen, path="/v1/memory/job/1-3") == 401
        assert await server.ask(stolen, path=FILE.replace("/job/", "/other/")) == 401
        assert await other.ask(stolen) == 401, "another agent"
        alone = {name: stolen[name] for name in (TICKET_HEADER, GRANT_HEADER)}
        assert await server.ask(alone) == 401, "without a proof"
        assert await server.ask({TICKET_HEADER: stolen[TICKET_HEADER]}) == 401
        own = Reader(by.ticket, by.grant, make_grant(KEY, None, "job", 1, "b", at=0.0)[1])
        assert await server.read(own) == 401, "with a key of the thief's"
        old = by.headers(server.address, FILE, SPAN, at=time.time() - AGE_S_MAX - 5)
        assert await server.ask(old) == 401, "a minute later"
        assert await server.ask(stolen) == 206, "the same bytes, which it was shown beside them"
    cost(
        "a worker's ticket stolen", "read the job's snapshots from all nodes for an hour", "refused"
    )


async def test_the_clusters_key_alone_reads_no_snapshots_under_tls(authority, cost):
    async with two_agents(authority, is_tls=True) as (server, _, b):
        now = time.time()
        keyed = make_grant(KEY, None, "job", 1, "b", at=now)
        assert await server.ask({TICKET_HEADER: ticket(KEY, "job", 1, "b", at=now)}) == 401
        assert await server.read(Reader("", *keyed)) == 401
        evil, person = certified(authority, "evil"), certified(authority, "alice", "user")
        folder = authority.folder.parent
        theirs = member(Authority.create(folder / "ca2", "test"), "agent", "b", folder / "b2")
        for who, of, job, at in [
            ("another node", evil, "job", now),
            ("a person", person, "job", now),
            ("another authority's", theirs, "job", now),
            ("for longer than an hour", b, "job", now + TICKET_S),
            ("for another job", b, "other", now),
        ]:
            made = make_grant(KEY, of, job, 1, "b", at=at)
            assert await server.read(Reader("", *made)) == 401, who
        assert await server.read(Reader("", *make_grant(KEY, b, "job", 1, "b", at=now))) == 206
    cost("the cluster's key stolen, under TLS", "read all snapshots", "refused")


async def test_a_malformed_certificate_in_a_grant_is_refused(authority):
    about = f"until={int(time.time()) + 60}, generation=1, reader=b, holder={'0' * 64}"
    async with two_agents(authority, is_tls=True) as (server, _, b):
        der, signature = b.sign(b"text")
        version_3, version_6 = (bytes((0xA0, 3, 2, 1, number)) for number in (2, 5))
        assert version_3 in der
        for wrong in (der.replace(version_3, version_6, 1), b"no certificate"):
            certificate = base64.b64encode(wrong).decode()
            shown = f"{about}, certificate={certificate}, signature={signature.hex()}"
            assert await server.ask({GRANT_HEADER: shown}) == 401


async def test_bytes_that_are_no_text_in_a_grant_or_ticket_are_refused(authority):
    start, mac = f"until={int(time.time()) + 60}, generation=1, reader=\xff", f"mac={'0' * 64}"
    shown = {
        TICKET_HEADER: f"{start}, {mac}",
        GRANT_HEADER: f"{start}, holder={'0' * 64}, {mac}",
    }

    def ask(name: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(server.address, timeout=20)) as caller:
            caller.request("GET", FILE, headers={name: shown[name]})
            return caller.getresponse().status

    async with two_agents(authority, is_tls=False) as (server, _, __):
        assert [await asyncio.to_thread(ask, name) for name in shown] == [401, 401]


async def test_a_revoked_node_reads_no_snapshots(authority, monkeypatch):
    monkeypatch.setattr("agents.rpc.tls.LOOK_S", 0.0)
    by = reader(KEY, "job", "b", tls=certified(authority, "b"))
    own = certified(authority, "a")
    stranger = Tls(TlsFiles(authority.folder / "ca.pem"), "test", "agent")
    async with serving(authority.folder.parent / "memory", own, stranger) as server:
        assert await server.read(by) == 206
        authority.revoke("agent/b")
        authority.copy_public(authority.folder.parent / "a")
        assert await server.read(by) == 401, "also with a grant that was checked before"
        again = Tls(files_in(authority.folder.parent / "b"), "test", "agent")
        assert await server.read(reader(KEY, "job", "b", tls=again)) == 401


async def test_workers_of_an_earlier_version_read_with_a_ticket_until_their_node_is_upgraded(
    tmp_path,
):
    async with serving(tmp_path / "memory", None, None, earlier="old") as server:
        for name, status in (("old", 206), ("new", 401)):
            shown = ticket(KEY, "job", 1, name, at=time.time())
            assert await server.ask({TICKET_HEADER: shown}) == status
