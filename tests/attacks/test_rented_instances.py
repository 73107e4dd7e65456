"""A thief of the cluster's key, of a proof or of a certificate tries to be a rented instance."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agents.rpc.certificates import new_key, proof_audience, request_of
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.enrolment import PATH
from agents.rpc.identity import Identity
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import Tls, TlsFiles
from sailord.authority import Authority
from tests.fakes.gce.cloud import Vm
from tests.fakes.google_identity import GoogleIdentity, generate_private_key
from tests.gce.rented_cluster import HERE, LARGE, THERE, RentedCluster, rented_cluster
from tests.sailord.certificates import member
from tests.sailord.providers.emulated_cluster import wait_until
from worker.atomic_file import OWNER_ONLY, replace_file

pytestmark = pytest.mark.slow
GOOGLE = GoogleIdentity()
FALSE = GoogleIdentity(key=generate_private_key(65537, 2048))
OTHERS = GoogleIdentity("others-project")


class Thief:
    """Speaks to sailord with the cluster's key, and shows a certificate only if it is given."""

    def __init__(self, life: RentedCluster) -> None:
        self.place = life.place
        self.key = ClusterKey.read(life.place.folder / "key", "local")
        self.stranger = Tls(TlsFiles(life.place.folder / "ca" / "ca.pem"), "local", "agent")

    def ask(self, method: str, body: bytes = b"", tls: Tls | None = None) -> tuple[int, Any]:
        async def call() -> tuple[int, bytes]:
            async with aiohttp.ClientSession() as session:
                client = SignedClient(session, self.key, tls=tls or self.stranger)
                where = f"127.0.0.1:{self.place.port}"
                return await client.call(where, method, PATH, body, to="sailord", timeout_s=30)

        try:
            status, answer = asyncio.run(call())
        except CallFailed as error:
            return 0, str(error)
        return status, json.loads(answer)

    def is_shut_out(self, tls: Tls) -> bool:
        """Whether the certificate is refused as revoked; an answer names the list of those."""
        status, said = self.ask("GET", tls=tls)
        return status != 200 and "revoked" in str(said)

    def enrol(
        self, name: str, proof: str | None = None, key: ec.EllipticCurvePrivateKey | None = None
    ) -> str:
        """Ask for a certificate; return it, or why there is none."""
        status, said = self.ask("POST", request_of(Identity("local", "agent", name), key, proof)[1])
        if status == 200:
            return str(said["certificate"])
        return "; ".join(f"{each['what']}" for each in said["problems"])


def proof(
    vm: Vm, key: ec.EllipticCurvePrivateKey, by: GoogleIdentity = GOOGLE, **changes: Any
) -> str:
    """What Google gives an instance that holds a key."""
    audience = proof_audience(Identity("local", "agent", vm.name), key.public_key())
    return by.token(audience, vm.name, str(vm.id), **changes)


def tls_with(folder: Path, thief: Thief, certificate: str, private: bytes) -> Tls:
    folder.mkdir()
    replace_file(folder / "key.pem", private, mode=OWNER_ONLY)
    (folder / "certificate.pem").write_text(certificate)
    ca = thief.place.folder / "ca" / "ca.pem"
    return Tls(TlsFiles(ca, folder / "certificate.pem", folder / "key.pem"), "local", "agent")


def test_only_an_instance_that_is_rented_now_gets_a_certificate_and_only_once(
    tmp_path_factory, cost
):
    folder = tmp_path_factory.mktemp("rented")
    with rented_cluster(folder / "c", "", tls=True, agents_come=False) as life:
        life.cloud.stock = {(HERE, LARGE, True): 1, (THERE, LARGE, True): 1}
        life.submit()
        wait_until(lambda: len(life.cloud.there()) == 2)
        vm, other = life.cloud.there()
        thief, key = Thief(life), new_key()

        alone = "not enrolled by the cluster's key alone"
        assert alone in thief.enrol("n1")
        assert alone in thief.enrol(vm.name)
        stolen = proof(vm, key)
        unproven = "does not prove that it is an instance"
        refused = {
            "with another key": thief.enrol(vm.name, stolen),
            "for another name": thief.enrol(other.name, stolen, key),
            "signed by another": thief.enrol(vm.name, proof(vm, key, FALSE), key),
            "of another project": thief.enrol(vm.name, proof(vm, key, OTHERS), key),
            "expired": thief.enrol(vm.name, proof(vm, key, exp=time.time() - 100), key),
            "of a person": thief.enrol(vm.name, proof(vm, key, google=None), key),
            "not a token": thief.enrol(vm.name, "x" * 5000, key),
        }
        assert {each: unproven in said for each, said in refused.items()} == dict.fromkeys(
            refused, True
        ), refused
        ours = Vm(**{**vars(vm), "id": 7, "name": "sailor-local-of-another"})
        assert "not rented now" in thief.enrol(ours.name, proof(ours, key), key)
        namesake = Vm(**{**vars(vm), "id": 8})
        assert "not rented now" in thief.enrol(vm.name, proof(namesake, key), key)

        # An operator's own machine renews what it was given.
        issued = member(Authority(life.place.folder / "ca", "local"), "agent", "n1", folder / "n1")
        renewal = request_of(Identity("local", "agent", "n1"))[1]
        assert thief.ask("POST", renewal, issued)[0] == 200

        # The instance itself, once its request was answered and stored.
        certificate = wait_until(lambda: _certificate(thief.enrol(vm.name, stolen, key)))
        again = "has a valid certificate"
        # Its answer may have been lost; what is signed again is for the same key.
        assert _certificate(thief.enrol(vm.name, stolen, key))
        more = new_key()
        assert again in thief.enrol(vm.name, proof(vm, more), more), "an instance has one key"
        private = request_of(Identity("local", "agent", vm.name), key)[0]
        tls = tls_with(folder / "stolen", thief, certificate, private)
        assert thief.ask("GET", tls=tls)[0] == 200
        renewal = request_of(Identity("local", "agent", vm.name))[1]
        assert thief.ask("POST", renewal, tls)[0] == 200, "it renews its own"

        late = new_key()
        unused = proof(other, late)
        life.cloud.preempt(other.name, notice_s=0)
        gone = "not rented now"
        wait_until(lambda: gone in thief.enrol(other.name, unused, late))

        life.kill_head()  # It hears of the end when it is back.
        lists = [life.place.folder / "ca" / name for name in ("issued.jsonl", "revoked.pem")]
        before = [path.read_bytes() for path in lists]
        life.cloud.preempt(vm.name, notice_s=0)
        life.start_head()
        wait_until(lambda: _state(life, vm) == "revoked")
        wait_until(lambda: gone in thief.enrol(vm.name, proof(vm, more), more))
        wait_until(lambda: thief.is_shut_out(tls))

        # As if the leader had not been able to revoke it.
        for path, content in zip(lists, before, strict=True):
            path.write_bytes(content)
        wait_until(lambda: thief.ask("GET", tls=tls)[0] == 200)
        status, said = thief.ask("POST", renewal, tls)
        assert status == 422, said
        assert gone in said["problems"][0]["what"]
    cost(
        "the cluster's key, a rented instance's proof and its certificate stolen",
        "the key alone enrolled any new name, for a week",
        "refused; the certificate ends with its instance",
    )


def _certificate(said: str) -> str:
    assert said.startswith("-----BEGIN") or "not rented now" in said, said
    return said if said.startswith("-----BEGIN") else ""


def _state(life: RentedCluster, vm: Vm) -> str:
    issued = Authority(life.place.folder / "ca", "local").issued()
    return next(each.state(time.time()) for each in issued if each.instance == str(vm.id))
