"""The certificate of an agent, or of a standby sailord, and its renewal.

It makes the key itself, and a sailord with an authority signs it, again and again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import structlog

from agents.daemon.backoff import Backoff
from agents.daemon.systemd import notify
from agents.rpc.certificates import (
    is_pair,
    new_key,
    proof_audience,
    read_key,
    request_of,
    share_of_life_left,
)
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.identity import Identity
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import Tls, TlsFiles, read_certificate
from agents.rpc.tls_settings import TlsSettings
from worker.atomic_file import OWNER_ONLY, replace_file, sync_folder

log = structlog.get_logger("tls")

PATH = "/v1/certificates"
RENEW_AT = 1 / 3
"""The share of a certificate's life at which it is renewed."""
LOOK_S = 60.0
"""How often the list of revoked certificates is fetched, and the certificate's age looked at."""
RETRY_S = 1.0
RETRY_S_MAX = 30.0
CALL_S = 10.0
COPY_S = 5.0
"""How often the copies for workers are compared with the originals."""


@dataclass(eq=False)
class Enrolment:
    """Fetches, and renews, one certificate."""

    settings: TlsSettings
    owner: Identity
    key: ClusterKey
    session: aiohttp.ClientSession
    prove: Callable[[str], Awaitable[str | None]] | None = None
    """Returns the cloud's proof, for one audience, that this node is an instance of it."""
    _unsaved: dict[str, str] | None = None
    """A sailord's answer until it is saved."""

    async def first(self) -> Tls:
        """Return the TLS of this process, once it has a certificate; wait for a sailord if not."""
        files, backoff = self.settings.files, Backoff(RETRY_S, RETRY_S_MAX)
        if self.settings.enrol is not None:
            take_next_key(files)
        while self.settings.enrol is not None and not self._has_certificate():
            if not await self._try(self._enrol(self._stranger)):
                # systemd would end a start that takes longer than TimeoutStartSec.
                notify("STATUS=waiting for a certificate\nEXTEND_TIMEOUT_USEC=60000000")
                await asyncio.sleep(backoff.next_s())
        return Tls(files, self.owner.cluster, self.owner.role, self.owner.name)

    def _has_certificate(self) -> bool:
        files = self.settings.files
        assert files.certificate is not None
        assert files.key is not None
        is_valid = share_of_life_left(files.certificate) > 0 and is_pair(
            files.certificate, files.key
        )
        # A node that was renamed gets one of its new name.
        return is_valid and read_certificate(files.certificate)[0] == self.owner

    @property
    def _stranger(self) -> Tls:
        """TLS settings without a certificate of our own, as before the first enrolment."""
        return Tls(TlsFiles(self.settings.files.ca), self.owner.cluster, self.owner.role)

    async def keep(self, tls: Tls) -> None:
        """Renew the certificate in time, and fetch the revoked ones, forever."""
        files = self.settings.files
        assert files.certificate is not None
        while self.settings.enrol is not None:
            await self._try(self._fetch_revoked(tls))
            left = share_of_life_left(files.certificate)
            if left < RENEW_AT:
                # A certificate that has expired opens no connection.
                await self._try(self._enrol(tls if left > 0 else self._stranger))
            await asyncio.sleep(LOOK_S)

    async def _try(self, work: Awaitable[None]) -> bool:
        try:
            await work
        except (CallFailed, OSError) as error:
            log.warning("the certificate cannot be renewed now", error=str(error))
            return False
        return True

    async def _enrol(self, tls: Tls) -> None:
        files = self.settings.files
        assert files.key is not None
        assert files.certificate is not None
        if self._unsaved is None:
            files.key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Send the same key until an answer arrives: a name that has a certificate gets none for
            # another key.
            key, proof = read_key(_next_key(files)) or new_key(), None
            if tls.own is None and self.prove is not None:
                proof = await self.prove(proof_audience(self.owner, key.public_key()))
            private, request = request_of(self.owner, key, proof)
            replace_file(_next_key(files), private, mode=OWNER_ONLY)
            self._unsaved = await self._ask(tls, "POST", request)
        self._write_revoked(self._unsaved)
        replace_file(files.certificate, self._unsaved["certificate"])
        take_next_key(files)
        self._unsaved = None
        log.info("got a certificate", certificate=str(self.owner))

    async def _fetch_revoked(self, tls: Tls) -> None:
        answer = await self._ask(tls, "GET", b"")
        if self._unsaved is not None:
            self._unsaved["revoked"] = answer["revoked"]
        self._write_revoked(answer)

    def _write_revoked(self, answer: dict[str, str]) -> None:
        path = self.settings.files.revoked
        if path is not None and (not path.exists() or path.read_text("ascii") != answer["revoked"]):
            replace_file(path, answer["revoked"])

    async def _ask(self, tls: Tls, method: str, body: bytes) -> dict[str, str]:
        """Ask the first of the addresses that answers as it should."""
        assert self.settings.enrol is not None
        refused = []
        for address in self.settings.enrol.split(","):
            try:
                return await self._ask_at(address.strip(), tls, method, body)
            except (CallFailed, OSError) as error:
                refused.append(str(error))
        raise CallFailed("; ".join(refused))

    async def _ask_at(self, address: str, tls: Tls, method: str, body: bytes) -> dict[str, str]:
        client = SignedClient(self.session, self.key, tls=tls)
        status, answer = await client.call(
            address, method, PATH, body, to="sailord", timeout_s=CALL_S
        )
        try:
            reply = json.loads(answer)
            if status == 200:
                return {name: str(reply[name]) for name in ("certificate", "revoked")}
            why = "; ".join(f"{p['place']}: {p['what']}; {p['cure']}" for p in reply["problems"])
        except (ValueError, KeyError, TypeError):
            why = f"it answered {status}"
        raise CallFailed(f"{address}: {why}")


def take_next_key(files: TlsFiles) -> None:
    """Use the next key if it is the certificate's, also after a crash between both writes."""
    assert files.key is not None
    assert files.certificate is not None
    if is_pair(files.certificate, _next_key(files)):
        _next_key(files).rename(files.key)
        sync_folder(files.key.parent)


def _next_key(files: TlsFiles) -> Path:
    """The key of the requested certificate, until that has replaced the present one."""
    assert files.key is not None
    return files.key.with_name(f".{files.key.name}.next")


async def keep_copies(files: TlsFiles, folder: Path) -> None:
    """Keep the copies for workers of another user up to date, forever."""
    while True:
        try:
            copies_for_workers(files, folder)
        except OSError as error:
            log.warning("the copies for workers cannot be renewed now", error=str(error))
        await asyncio.sleep(COPY_S)


def copies_for_workers(files: TlsFiles, folder: Path) -> TlsFiles:
    """Copy the files that are not secret into a folder that workers of another user may read."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, name in ((files.ca, "ca.pem"), (files.revoked, "revoked.pem")):
        if source is not None and source.exists():
            content, copy = source.read_bytes(), folder / name
            if not copy.exists() or copy.read_bytes() != content:
                replace_file(copy, content)
    has_revoked = files.revoked is not None
    return TlsFiles(folder / "ca.pem", revoked=folder / "revoked.pem" if has_revoked else None)


def worker_tls(files: TlsFiles, cluster: str) -> dict[str, str | None]:
    """Return what a worker verifies peers' agents with."""
    revoked: Path | None = files.revoked
    return {
        "ca": str(files.ca),
        "revoked": None if revoked is None else str(revoked),
        "server": f"agent.{cluster}.sailor",
    }
