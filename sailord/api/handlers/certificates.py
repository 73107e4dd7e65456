"""Signs agents' certificates: a request is signed with the cluster's key.

Where instances are rented, that key enrols nobody: an instance shows Google's word for which one it
is (ADR 114), and other machines get their first certificate from an operator.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agents.protocol.codec import WireError
from agents.rpc.identity import Identity
from agents.rpc.server import answer_signed
from agents.rpc.tls import peer_of, why_refused
from agents.store.interface import StoreError
from sailord.api.access.instance_proof import check_proof
from sailord.api.access.webhook_tokens import TokenError, key_id_of
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.agent_reports import refuse_signature
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.authority import REVOKED, Authority, SigningRequest
from sailord.capacity.rented import read_capacity
from sailord.providers.gce.config import GceConfig
from simulator.documents.problems import InputError, Problem


@dataclass(frozen=True, slots=True)
class CertificateView:
    """An agent's certificate, and the list of those that are valid no longer."""

    certificate: str
    """PEM; empty where none was asked for."""
    revoked: str
    """A list of revoked certificates, PEM."""


async def certificates(request: web.Request) -> web.StreamResponse:
    """Sign an agent's certificate, or return the list of revoked ones; the answer is signed too."""
    verifier = request.app[CONTEXT].verifier
    return await answer_signed(request, verifier, _answer, refuse=refuse_signature)


async def _answer(request: web.Request) -> web.Response:
    settings = request.app[CONTEXT].config.tls
    if settings is None or settings.authority is None:
        cure = "ask one that has authority under [tls], or run sailorctl ca renew"
        return Refusal(404, Problem("tls", "this sailord signs no certificates", cure)).response
    body = await request.read() if request.method == "POST" else None
    owner, folder = peer_of(request.transport), Path(settings.authority)
    # The connection may have been made before the certificate was revoked.
    if owner is not None and (why := why_refused(request.transport)):
        return Refusal(401, Problem(str(owner), why, "enrol on a new connection")).response
    try:
        instance = ""
        if body is not None and owner is None:
            instance = await _proven_instance(request.app[CONTEXT], body)
        elif body is not None and owner is not None:
            await _check_rented(request.app[CONTEXT], folder, owner)
        return answer(await asyncio.to_thread(_view, folder, body, owner, instance))
    except InputError as error:
        return refusal(422, *error.problems)  # Signed as well, or the agent would not believe it.


async def _proven_instance(api: ApiContext, request: bytes) -> str:
    """Return the number of the rented instance that asks; empty where none are rented.

    Raises ``InputError`` unless it proves that it is one.
    """
    if api.instance_keys is None:
        return ""
    asked = SigningRequest.read(request)
    place = str(asked.wanted)
    if not asked.proof:
        what = "is not enrolled by the cluster's key alone, since instances are rented here"
        command = f"sailorctl ca issue {asked.wanted} --out DIR"
        cure = f"for a machine of your own: {command} (docs/security.md)"
        raise InputError(Problem(place, what, cure))
    provider = api.config.provider
    assert isinstance(provider, GceConfig)
    try:
        keys = await api.instance_keys.find(key_id_of(asked.proof))
        proven = check_proof(asked.proof, keys, audience=asked.audience, project=provider.project)
    except TokenError as error:
        what = f"does not prove that it is an instance: {error}"
        raise InputError(Problem(place, what)) from None
    rented = await _read_rented(api, place)
    if proven.name != asked.wanted.name or rented.get(proven.id) != proven.name:
        what = f"is of {proven.name} ({proven.id}), which is not rented now"
        raise InputError(Problem(place, what, "an instance that was just made asks again"))
    return proven.id


async def _check_rented(api: ApiContext, folder: Path, owner: Identity) -> None:
    """Raise ``InputError`` if a certificate is of a rented instance that is no more.

    Its revocation may have failed, and a renewal would outlive the instance for ever.
    """
    if api.instance_keys is None:
        return
    last = await asyncio.to_thread(lambda: Authority.open(folder).last_of(owner.uri))
    if last is None or not last.instance:
        return
    if last.instance not in await _read_rented(api, str(owner)):
        what = f"is of an instance ({last.instance}) that is not rented now"
        raise InputError(Problem(str(owner), what, "an instance of that name enrols anew"))


async def _read_rented(api: ApiContext, place: str) -> dict[str, str]:
    """Return the names of the instances that are rented now, by their numbers."""
    try:
        books = await read_capacity(api.gateway)
    except (StoreError, WireError) as error:
        what = f"cannot be compared with what is rented: {error}"
        raise InputError(Problem(place, what)) from None
    return {
        each.instance.id: each.instance.name for each in books.machines if each.ended_at is None
    }


def _view(
    folder: Path, request: bytes | None, owner: Identity | None, instance: str
) -> CertificateView:
    authority = Authority.open(folder)
    signed = b"" if request is None else authority.enrol(request, owner, instance=instance)
    return CertificateView(signed.decode(), (folder / REVOKED).read_text(encoding="ascii"))
