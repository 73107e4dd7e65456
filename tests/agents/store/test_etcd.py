"""Failures of an etcd cluster: lost leaders, lost quorums, passwords, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path

import grpc
import pytest

from agents.rpc.tls import read_certificate
from agents.store.factory import open_store
from agents.store.interface import (
    Store,
    StoreRefused,
    StoreUnavailable,
    WriteRejected,
    WriteUnknown,
)
from sailord.authority import Authority
from simulator.documents.problems import InputError
from tests.agents.store.places import NEEDS_ETCD, PATIENCE_S, Cluster, wait_answer
from tests.agents.store.rights import let_guest, require_passwords

pytestmark = [pytest.mark.slow, NEEDS_ETCD]


@pytest.fixture
def cluster(one_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster of three members, all running."""
    yield one_cluster
    for i, process in enumerate(one_cluster.processes):
        one_cluster.resume(i)
        if process.poll() is not None:
            one_cluster.start([i])


async def wait_put(store: Store, key: str, value: bytes) -> int:
    """Put until it is acknowledged; the put is idempotent."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreUnavailable, WriteUnknown):
                return await store.put(key, value)


async def test_no_write_is_lost_with_the_leader(cluster, prefix):
    store = await cluster.open()
    after = (await wait_answer(store)).revision
    lease = await store.grant(30)
    await store.put(prefix + "lease", b"", lease=lease.id)
    seen: list[int] = []

    async def watch() -> None:
        async with aclosing(store.watch(prefix + "n", after=after)) as news:
            async for changed in news:
                seen.extend(int(each.entry.value) for each in changed.changes)
                if seen[-1] == 199:
                    return

    watching = asyncio.create_task(watch())
    for number in range(200):
        if number == 100:
            cluster.kill([await cluster.leader()])
        await wait_put(store, prefix + "n", str(number).encode())
    await asyncio.wait_for(watching, PATIENCE_S)
    # An unknown write was repeated: a number may come twice, but none is missing.
    assert sorted(set(seen)) == list(range(200))
    assert seen == sorted(seen)
    assert await store.keep(lease.id)
    assert (await store.get(prefix + "lease")).lease == lease.id
    await store.close()


async def test_a_lost_quorum_is_reported_and_recovered_from(cluster, prefix):
    store = await cluster.open()
    await wait_answer(store)
    before = await store.put(prefix + "a", b"before")
    after = (await store.snapshot(prefix)).revision
    lost = [0, 2]
    async with aclosing(store.watch(prefix, after=after)) as news:
        told = asyncio.create_task(anext(news))
        await asyncio.sleep(0.1)
        cluster.kill(lost)
        with pytest.raises((StoreUnavailable, WriteUnknown)):
            await store.put(prefix + "a", b"lost")
        with pytest.raises(StoreUnavailable):
            await store.get(prefix + "a")
        with pytest.raises(StoreUnavailable):
            await store.grant(5)
        cluster.start(lost)
        await wait_answer(store)
        entry = await store.get(prefix + "a")
        assert entry.value in (b"before", b"lost")
        assert (entry.modified == before) == (entry.value == b"before")
        revision = await wait_put(store, prefix + "b", b"")
        changed = await asyncio.wait_for(told, PATIENCE_S)
        while changed.revision < revision:
            changed = await asyncio.wait_for(anext(news), PATIENCE_S)
        assert changed.changes[0].key == prefix + "b"
    await store.close()


async def test_members_that_are_down_are_skipped(cluster, prefix):
    closed = "127.0.0.1:9"
    last = cluster.endpoints[-1]
    store = await open_store(f"etcd://{closed},missing.invalid:1,{last}?timeout_s={PATIENCE_S}")
    revision = await store.put(prefix + "a", b"")
    assert (await store.get(prefix + "a")).modified == revision
    await store.close()
    store = await open_store(f"etcd://{closed}?timeout_s=0.3")
    with pytest.raises(StoreUnavailable, match=r"within 0.3 s; the last problem: 127.0.0.1:9: .+"):
        await store.put(prefix + "a", b"")
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.put(prefix + "a", b"")


async def test_an_etcd_member_without_answer_is_left_and_its_write_is_unknown(cluster, prefix):
    store = await open_store(cluster.url)
    await wait_answer(store)
    await wait_put(store, prefix + "a", b"")
    # Stop one member after the other until it is the one that is asked.
    members = range(len(cluster.processes))
    for i in members:
        cluster.pause(i)
        with contextlib.suppress(StoreUnavailable):
            await store.get(prefix + "a")
        await wait_put(store, prefix + "b", b"")
        cluster.resume(i)
        await wait_answer(store)
    for i in members:
        cluster.pause(i)
    with pytest.raises(WriteUnknown):
        await store.put(prefix + "a", b"")
    with pytest.raises(StoreUnavailable):
        await store.get(prefix + "a")
    await store.close()


async def test_a_watch_leaves_an_etcd_member_that_stops_answering(cluster, prefix):
    store = await cluster.open()
    after = (await wait_answer(store)).revision
    async with aclosing(store.watch(prefix, after=after)) as news:
        told = asyncio.create_task(anext(news))
        await asyncio.sleep(0.2)
        # The cluster is healthy, so the watch is at the first endpoint.
        cluster.pause(0)
        revision = await wait_put(store, prefix + "a", b"")
        assert (await asyncio.wait_for(told, PATIENCE_S)).revision <= revision
    await store.close()


def secret_file(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


async def test_a_wrong_password_is_refused(tmp_path):
    secret_file(tmp_path / "right", "secret\n")
    secret_file(tmp_path / "wrong", "Secret\n")
    secret_file(tmp_path / "guest", "guest")
    with closing(Cluster()) as cluster:

        async def open_as(user: str, file: str) -> Store:
            return await open_store(f"{cluster.url}&user={user}&password_file={tmp_path}/{file}")

        store = await cluster.open()
        await wait_answer(store)
        too_early = await open_as("root", "right")
        with pytest.raises(StoreRefused, match="authentication is not enabled"):
            await too_early.get("/a")
        await require_passwords(cluster)
        with pytest.raises(StoreRefused, match="user name is empty"):
            await store.put("/a", b"")
        (tmp_path / "right").chmod(0o640)
        open_to_others = await open_as("root", "right")
        with pytest.raises(StoreRefused, match="its mode 0640 lets others use it; chmod 600"):
            await open_to_others.put("/a", b"")
        (tmp_path / "right").chmod(0o600)
        root = await open_as("root", "right")
        after = await root.put("/a", b"1")
        lease = await root.grant(60)
        assert await root.keep(lease.id)
        wrong = await open_as("root", "wrong")
        with pytest.raises(StoreRefused, match="authentication failed"):
            await wrong.get("/a")
        none = await open_as("root", "none")
        with pytest.raises(StoreRefused, match="password file of etcd cannot be read"):
            await none.get("/a")
        guest = await open_as("guest", "guest")
        with pytest.raises(StoreRefused, match="permission denied"):
            await guest.put("/a", b"2")
        with pytest.raises(StoreRefused, match=r"denied a watch of /a: .*permission denied"):
            await anext(guest.watch("/a", after=after))
        # A restarted server has forgotten its tokens.
        watcher = await open_as("root", "right")
        async with aclosing(watcher.watch("/a", after=after)) as news:
            told = asyncio.create_task(anext(news))
            await asyncio.sleep(0.2)
            cluster.kill()
            cluster.start()
            await wait_answer(root)
            assert await root.keep(lease.id)
            revision = await root.put("/a", b"2")
            assert (await asyncio.wait_for(told, PATIENCE_S)).revision == revision
        for each in (store, too_early, open_to_others, root, watcher, wrong, none, guest):
            await each.close()


async def test_a_watch_outlives_its_token(tmp_path):
    """The client makes no other call, so the watch itself must fetch a token."""
    secret_file(tmp_path / "right", "secret")
    with closing(Cluster(arguments=("--auth-token-ttl", "1"))) as cluster:
        await wait_answer(await cluster.open())
        await require_passwords(cluster)
        enter = f"&user=root&password_file={tmp_path}/right"
        store, other = [await open_store(cluster.url + enter) for _ in range(2)]
        after = await store.put("/a", b"1")
        await asyncio.sleep(3)
        news = store.watch("/a", after=after)
        revision = await other.put("/a", b"2")
        assert (await asyncio.wait_for(anext(news), PATIENCE_S)).revision == revision
        await news.aclose()
        await store.close()
        await other.close()


def _certify(folder: Path) -> None:
    """Create a certificate authority, and a certificate for server and client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        openssl(
            "req", "-x509", *ec, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", "/CN=ca"
        )
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "client"):
        openssl("req", *ec[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=x")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem", "-days", "2")


async def test_client_certificates_are_required(tmp_path):
    _certify(tmp_path)
    arguments: Sequence[str] = (
        *("--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key")),
        *("--trusted-ca-file", str(tmp_path / "ca.pem"), "--client-cert-auth"),
    )
    with closing(Cluster(arguments=arguments, scheme="https")) as cluster:
        own = f"&cert={tmp_path}/client.pem&key={tmp_path}/client.key"
        store = await open_store(f"{cluster.url}&ca={tmp_path}/ca.pem{own}")
        await wait_answer(store)
        revision = await store.put("/a", b"1")
        assert (await store.get("/a")).modified == revision
        await store.close()
        for options in ("", f"&ca={tmp_path}/ca.pem", f"&ca={tmp_path}/other.pem{own}"):
            stranger = await open_store(cluster.url + options)
            with pytest.raises(StoreUnavailable, match="no member of etcd answered"):
                await stranger.put("/a", b"2")
            await stranger.close()
    with pytest.raises(InputError) as caught:
        await open_store(f"etcd://a?ca=/none/ca.pem&cert=/none/c.pem&key={tmp_path}/client.key")
    assert [problem.place for problem in caught.value.problems] == [
        "the store's ca",
        "the store's cert",
    ]


@pytest.mark.parametrize("size", [100_000, 900_000])
async def test_write_that_is_too_long_for_its_etcd_is_rejected_at_once(size):
    """The longer one is not even read by etcd: gRPC refuses it, as if the member were busy."""
    with closing(Cluster(1, arguments=["--max-request-bytes=50000"])) as small:
        store = await small.open()
        await wait_answer(store)
        with pytest.raises(WriteRejected, match=r"too large|larger than max"):
            await store.put("/a", b"x" * size)
        assert await store.get("/a") is None
        await store.put("/a", b"x")
        await store.close()


async def test_write_without_permission_is_rejected_and_a_wrong_password_is_not(tmp_path):
    """Another password may come; the keys of this write stay forbidden."""
    secret_file(tmp_path / "right", "guest")
    secret_file(tmp_path / "wrong", "nothing")
    with closing(Cluster(1)) as cluster:
        store = await cluster.open()
        await wait_answer(store)
        await store.close()
        await require_passwords(cluster)
        await let_guest(cluster, "/ours/")
        kinds = {}
        for name in ("right", "wrong"):
            place = f"{cluster.url}&user=guest&password_file={tmp_path}/{name}"
            guest = await open_store(place)
            with pytest.raises(StoreRefused) as refused:
                await guest.put("/theirs", b"")
            kinds[name] = type(refused.value)
            await guest.close()
        assert kinds == {"right": WriteRejected, "wrong": StoreRefused}


async def test_sailors_authority_certifies_members_and_clients_of_an_etcd_with_users(tmp_path):
    authority = Authority.create(tmp_path / "ca", "prod")
    authority.issue("store", "one", tmp_path / "one", hosts=["127.0.0.1", "localhost"])
    authority.issue("user", "admin", tmp_path / "admin")
    own = authority.issue("agent", "n1", tmp_path / "n1", days=4 / 86400)
    secret_file(tmp_path / "password", "secret")
    secret_file(tmp_path / "guest", "guest")
    files = tmp_path / "one"
    arguments: Sequence[str] = (
        *("--cert-file", str(files / "certificate.pem"), "--key-file", str(files / "key.pem")),
        *("--trusted-ca-file", str(files / "ca.pem"), "--client-cert-auth"),
    )
    names = ("ca.pem", "key.pem", "certificate.pem")
    ca, key, certificate = ((tmp_path / "admin" / name).read_bytes() for name in names)
    with closing(Cluster(arguments=arguments, scheme="https")) as cluster:
        cluster.credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        url = f"{cluster.url}&ca={tmp_path}/ca/ca.pem"
        certified = f"{url}&cert={tmp_path}/n1/certificate.pem&key={tmp_path}/n1/key.pem"
        plain = await open_store(certified)
        await wait_answer(plain)
        await require_passwords(cluster)
        store, guest = [
            await open_store(f"{certified}&user={user}&password_file={tmp_path}/{file}")
            for user, file in (("root", "password"), ("guest", "guest"))
        ]
        await store.put("/a", b"1")
        with pytest.raises(StoreRefused, match="permission denied"):
            await guest.put("/a", b"2")
        with pytest.raises(StoreRefused, match=r"user name is empty|permission denied"):
            await plain.put("/a", b"2")
        # The certificate expires; what renews it replaces the files of the open store.
        while read_certificate(tmp_path / "n1" / "certificate.pem")[1] > time.time():
            await asyncio.sleep(0.1)
        cluster.kill()
        cluster.start()
        with pytest.raises(StoreUnavailable, match="no member of etcd answered"):
            await store.get("/a")
        authority.issue(own.role, own.name, tmp_path / "n1")
        await wait_answer(store)
        assert (await store.get("/a")).value == b"1"
        for each in (plain, store, guest):
            await each.close()
