"""TLS over real sockets: each stranger gets one clear error, and the server's log names it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from agents.daemon.credentials import check_mode
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.listener import LINES_MAX, Listener, _Handshakes, _Refusals
from agents.rpc.server import answer_signed, refuse_stranger
from agents.rpc.signing import ClusterKey, Verifier
from agents.rpc.strangers import EvictableConnection, StrangerLimits
from agents.rpc.tls import Tls, TlsFiles, explain
from agents.rpc.unsigned_bodies import UNSIGNED
from sailord.authority import Authority
from sailord.client import Client, ServerProblem
from simulator.documents.problems import InputError
from tests.sailord.certificates import files_in, member

KEY = ClusterKey("test", (b"k" * 32,))


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca", "test")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


@contextlib.asynccontextmanager
async def serving(tls: Tls | None, *roles: str) -> AsyncIterator[str]:
    """The address of a server that answers signed requests of these roles."""
    verifier = Verifier(KEY, lambda: address)

    async def say(request: web.Request) -> web.StreamResponse:
        if why := refuse_stranger(request, *roles):
            return web.Response(status=403, text=f"{why}\n")
        return web.Response(text="done")

    @web.middleware
    async def check(request, handler):
        return await answer_signed(request, verifier, handler)

    app = web.Application(middlewares=[check])
    app[UNSIGNED] = {}
    app.router.add_get("/", say)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = Listener(runner, StrangerLimits(), tls)
    await listener.start("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.port}"
    try:
        yield address
    finally:
        await listener.close()
        await runner.cleanup()


async def ask(session, address: str, tls: Tls | None, to: str = "agent") -> tuple[int, str]:
    status, body = await SignedClient(session, KEY, tls=tls).call(address, "GET", "/", to=to)
    return status, body.decode().strip()


async def said(log: list, text: str) -> None:
    """Wait until the server's log has a line with this text."""
    async with asyncio.timeout(10):
        while not any(text in str(line.get("error")) for line in log):
            await asyncio.sleep(0.01)


async def test_members_of_a_cluster_talk_and_roles_are_checked_at_both_ends(
    authority, tmp_path, session
):
    head = member(authority, "sailord", "head", tmp_path / "head")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    async with serving(node, "sailord") as address:
        assert await ask(session, address, head) == (200, "done")
        assert await ask(session, address, head, "n1.agent") == (200, "done")
        why = "the certificate is of agent/n1, which may not do this"
        assert await ask(session, address, node) == (403, why)
        for wrong in ("sailord", "n2.agent"):
            with pytest.raises(CallFailed, match="the certificate is of another member"):
                await ask(session, address, head, wrong)
        stranger = Tls(TlsFiles(tmp_path / "ca" / "ca.pem"), "test", "agent")
        why = "show a certificate of this cluster's authority"
        assert await ask(session, address, stranger) == (403, why)


def expired(authority: Authority, tmp_path) -> Tls:
    """A certificate that expired while its process ran."""
    made = member(authority, "agent", "late", tmp_path / "late", days=2 / 86400)
    while time.time() < made.until:
        time.sleep(0.05)
    return made


def revoked(authority: Authority, tmp_path) -> Tls:
    made = member(authority, "agent", "gone", tmp_path / "gone")
    authority.revoke("agent/gone")
    return made


def foreign(_: Authority, tmp_path) -> Tls:
    """A certificate of another authority, whose holder has this one's certificate, too."""
    other = Authority.create(tmp_path / "other", "test")
    other.issue("agent", "eve", tmp_path / "eve")
    (tmp_path / "eve" / "ca.pem").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
    files = files_in(tmp_path / "eve")
    return Tls(TlsFiles(files.ca, files.certificate, files.key), "test", "agent")


BAD = [
    (expired, "the certificate has expired"),
    (revoked, "the certificate is revoked"),
    (foreign, "not of this cluster's authority|not of its authority|certificate is not accepted"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "why"), BAD)
async def test_a_bad_certificate_of_a_client_is_refused_at_both_ends(
    authority, tmp_path, session, make: Callable[..., Tls], why
):
    bad = make(authority, tmp_path)
    head = member(authority, "sailord", "head", tmp_path / "head")
    with capture_logs() as log:
        async with serving(head, "agent") as address:
            with pytest.raises(CallFailed, match=why):
                await ask(session, address, bad, "sailord")
            await said(log, why.partition("|")[0])
            assert [line["peer"] for line in log] == ["127.0.0.1"]


@pytest.mark.parametrize(("make", "why"), BAD)
async def test_a_bad_certificate_of_a_server_is_refused_by_the_client(
    authority, tmp_path, session, make: Callable[..., Tls], why
):
    bad = make(authority, tmp_path)
    head = member(authority, "sailord", "head", tmp_path / "head")
    async with serving(bad, "sailord") as address:
        with pytest.raises(CallFailed, match=why):
            await ask(session, address, head)


async def test_plain_http_meets_tls_with_an_error_at_both_ends(authority, tmp_path, session):
    head = member(authority, "sailord", "head", tmp_path / "head")
    with capture_logs() as log:
        async with serving(head, "agent") as address:
            with pytest.raises(CallFailed, match="it may require TLS"):
                await ask(session, address, None)
            await said(log, "plain HTTP was spoken to a TLS port")
    async with serving(None, "agent") as address:
        with pytest.raises(CallFailed, match="it speaks plain HTTP, and we speak TLS"):
            await ask(session, address, head)


async def test_files_that_do_not_fit_leave_the_pair_that_signs(authority, tmp_path, monkeypatch):
    """A copy may stop between the two files, or within one."""
    monkeypatch.setattr("agents.rpc.tls.LOOK_S", 0.0)
    node = member(authority, "agent", "n1", tmp_path / "n1")
    server = member(authority, "agent", "n2", tmp_path / "n2")
    authority.issue("agent", "n1", tmp_path / "new")
    old = (tmp_path / "n1" / "certificate.pem").read_bytes()
    new = (tmp_path / "new" / "certificate.pem").read_bytes()

    def signer() -> bytes:
        der, signature = node.sign(b"text")
        assert server.check_signed(b"text", der, signature)[0].name == "n1"
        return ssl.DER_cert_to_PEM_cert(der).encode()

    for broken in (new, b"-----BEGIN", b""):
        (tmp_path / "n1" / "certificate.pem").write_bytes(broken)
        assert [signer() for _ in range(3)] == [old] * 3
    for name in ("key.pem", "certificate.pem"):
        (tmp_path / "n1" / name).write_bytes((tmp_path / "new" / name).read_bytes())
    assert signer() == new


async def test_new_certificates_are_used_without_a_restart(
    authority, tmp_path, session, monkeypatch
):
    monkeypatch.setattr("agents.rpc.tls.LOOK_S", 0.0)
    head = member(authority, "sailord", "head", tmp_path / "head")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    async with serving(node, "sailord") as address:
        assert await ask(session, address, head) == (200, "done")
        before = head.until
        authority.issue("sailord", "head", tmp_path / "head", days=30)
        assert await ask(session, address, head) == (200, "done")
        assert head.until > before + 86400
        authority.revoke("sailord/head")
        authority.copy_public(tmp_path / "n1")
        assert await ask(session, address, head) == (403, "the certificate is revoked")
        await session.connector.close()
    async with serving(node, "sailord") as address, aiohttp.ClientSession() as again:
        with pytest.raises(CallFailed, match="the certificate is revoked"):
            await ask(again, address, head)
        (tmp_path / "n1" / "key.pem").write_text("broken")
        with capture_logs() as log:
            for _ in range(3):
                with pytest.raises(CallFailed, match="revoked"):
                    await ask(again, address, head)
            await said(log, "certificate.pem: does not hold a certificate of that key")


async def test_sailorctl_shows_its_certificate_and_verifies_sailords(authority, tmp_path):
    head = member(authority, "sailord", "head", tmp_path / "head")
    alice = member(authority, "user", "alice", tmp_path / "alice")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    async with serving(head, "user") as address:
        client = Client(f"https://{address}", tls=alice)
        with pytest.raises(ServerProblem) as refused:  # It signs nothing, but it is heard.
            await asyncio.to_thread(client.ask, "GET", "/")
        assert refused.value.status == 401
        plain = Client(f"http://{address}")
        with pytest.raises(ServerProblem, match="it may require TLS"):
            await asyncio.to_thread(plain.ask, "GET", "/")
    async with serving(node, "user") as address:
        client = Client(f"https://{address}", tls=alice)
        with pytest.raises(ServerProblem, match="the certificate is of another member"):
            await asyncio.to_thread(client.ask, "GET", "/")


async def test_a_silent_connection_delays_no_other(authority, tmp_path, session, monkeypatch):
    monkeypatch.setattr("agents.rpc.listener.HANDSHAKE_S", 0.2)
    head = member(authority, "sailord", "head", tmp_path / "head")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    with capture_logs() as log:
        async with serving(head, "agent") as address:
            host, _, port = address.partition(":")
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(socket.create_connection((host, int(port))))
                assert await ask(session, address, node, "sailord") == (200, "done")
                await said(log, "")
    assert len(log) == 1, "the same failure of the same host is one line"


async def test_one_address_cannot_hold_all_handshakes(authority, tmp_path, session, monkeypatch):
    monkeypatch.setattr("agents.rpc.listener.HANDSHAKES_MAX", 8)
    monkeypatch.setattr("agents.rpc.listener.HANDSHAKE_S", 120.0)
    head = member(authority, "sailord", "head", tmp_path / "head")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    async with serving(head, "agent") as address:
        port = int(address.rpartition(":")[2])
        with contextlib.ExitStack() as stack:

            def silent(source: str) -> socket.socket:
                wire = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
                stack.enter_context(wire)
                wire.setblocking(False)
                return wire

            slow = silent("127.0.0.2")
            crowd = [silent("127.0.0.3") for _ in range(8)]
            loop = asyncio.get_running_loop()
            assert await ended(loop, crowd[0])
            assert await ask(session, address, node, "sailord") == (200, "done")
            for wire in (slow, crowd[-1]):  # These wait on.
                with pytest.raises(BlockingIOError):
                    wire.recv(1)


async def test_a_handshake_that_ends_as_it_succeeds_breaks_no_other_connection(
    authority, tmp_path, session, monkeypatch
):
    """The next connection has its descriptor, which asyncio must not watch for it any more."""
    head = member(authority, "sailord", "head", tmp_path / "head")
    node = member(authority, "agent", "n1", tmp_path / "n1")
    begun: list[asyncio.Task[None]] = []
    begin, made = _Handshakes.begin, EvictableConnection.connection_made

    def note(self: _Handshakes, place: str, task: asyncio.Task[None]) -> None:
        begun.append(task)
        begin(self, place, task)

    def cancel(self: EvictableConnection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        if len(begun) == 1:
            begun[0].cancel()

    monkeypatch.setattr(_Handshakes, "begin", note)
    monkeypatch.setattr(EvictableConnection, "connection_made", cancel)
    async with serving(head, "agent") as address:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=node.client, server_hostname=node.server_name("sailord")
        )
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert await ask(session, address, node, "sailord") == (200, "done")


async def ended(loop: asyncio.AbstractEventLoop, wire: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await loop.sock_recv(wire, 1) == b""
    return True


async def test_failed_handshakes_write_few_lines(monkeypatch):
    """Also of a sender that owns a network of IPv6, or of many senders."""
    now = 1000.0
    monkeypatch.setattr("agents.rpc.listener.time.monotonic", lambda: now)
    refusals = _Refusals()
    with capture_logs() as log:
        for i in range(1000):
            refusals.note((f"2001:db8::{i:x}", 1, 0, 0), "why")
        assert [line["peer"] for line in log] == ["2001:db8::0"]
        for i in range(1000):
            refusals.note((f"10.0.{i // 256}.{i % 256}", 1), "why")
        assert len(log) == LINES_MAX
        now += 60.0
        refusals.note(("10.0.0.1", 1), "why")
        assert sum(line["others"] for line in log) + len(log) == 2001


async def test_files_that_cannot_be_used_say_which_and_why(authority, tmp_path):
    authority.issue("agent", "n1", tmp_path / "n1")
    authority.issue("agent", "n2", tmp_path / "n2")
    files = files_in(tmp_path / "n1")
    with pytest.raises(
        InputError, match=r"is of sailor://test/agent/n1, not sailor://test/agent/x"
    ):
        Tls(files, "test", "agent", "x")
    with pytest.raises(InputError, match=r"not sailor://other/agent/n1; issue one of"):
        Tls(files, "other", "agent")
    with pytest.raises(InputError, match="does not hold a certificate of that key"):
        Tls(TlsFiles(files.ca, files.certificate, tmp_path / "n2" / "key.pem"), "test", "agent")
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with pytest.raises(InputError, match=r"empty\.pem: does not hold certificates"):
        Tls(TlsFiles(empty, files.certificate, files.key), "test", "agent")
    (tmp_path / "n1" / "key.pem").chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        check_mode(tmp_path / "n1" / "key.pem")


async def test_unknown_errors_keep_their_text():
    assert "odd" in explain(ssl.SSLError("odd"))
    assert explain(http.client.BadStatusLine("x")) == "x"


async def test_while_authorities_change_both_are_trusted_with_the_list_of_one(tmp_path, session):
    """Servers still refuse what their list names."""
    old, new = (Authority.create(tmp_path / name, "test") for name in ("old", "new"))
    head = member(new, "sailord", "head", tmp_path / "head")
    agent = member(old, "agent", "n1", tmp_path / "n1")
    away = member(new, "agent", "n2", tmp_path / "n2")
    new.revoke("agent/n2")
    new.copy_public(tmp_path / "head")
    both = b"".join((each.folder / "ca.pem").read_bytes() for each in (new, old))
    for name in ("head", "n1", "n2"):
        (tmp_path / name / "ca.pem").write_bytes(both)
    head, agent, away = (
        Tls(files_in(tmp_path / each), "test", role)
        for each, role in (("head", "sailord"), ("n1", "agent"), ("n2", "agent"))
    )
    async with serving(head, "agent") as address:
        assert await ask(session, address, agent, "sailord") == (200, "done")
        why = "the certificate is revoked"
        assert await ask(session, address, away, "sailord") == (403, why)


async def test_two_lists_of_revoked_certificates_are_read(tmp_path):
    one, two = (Authority.create(tmp_path / name, "test") for name in ("one", "two"))
    for each in (one, two):
        each.issue("agent", "n1", tmp_path / "n1")
        each.revoke("agent/n1")
    own = files_in(tmp_path / "n1")
    for name in ("ca.pem", "revoked.pem"):
        texts = ((each.folder / name).read_bytes() for each in (two, one))
        (tmp_path / "n1" / name).write_bytes(b"".join(texts))
    own.ca.write_bytes(2 * own.ca.read_bytes())  # As if the procedure's first step was done twice.
    tls = Tls(own, "test", "agent")
    serials = {int(each.serial, 16) for made in (one, two) for each in made.issued()}
    assert tls._revoked == serials
    assert tls.client.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    own.revoked.write_bytes(own.ca.read_bytes())
    with pytest.raises(InputError, match="is not a list of revoked certificates"):
        Tls(own, "test", "agent")
