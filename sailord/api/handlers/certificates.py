"""Signs agents' certificates: a request is signed with the cluster's key."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agents.rpc.identity import Identity
from agents.rpc.server import answer_signed
from agents.rpc.tls import peer_of, why_refused
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.agent_reports import refuse_signature
from sailord.api.handlers.context import CONTEXT
from sailord.authority import REVOKED, Authority
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
    return await answer_signed(
        request,
        request.app[CONTEXT].verifier,
        _answer,
        refuse=refuse_signature,
    )


async def _answer(request: web.Request) -> web.Response:
    settings = request.app[CONTEXT].config.tls
    if settings is None or settings.by is None:
        cure = "ask one that has authority under [tls], or run sailorctl ca renew"
        return Refusal(404, Problem("tls", "this sailord signs no certificates", cure)).response
    body = await request.read() if request.method == "POST" else None
    owner, folder = peer_of(request.transport), Path(settings.by)
    # The connection may have been made before the certificate was revoked.
    if owner is not None and (why := why_refused(request.transport)):
        return Refusal(401, Problem(str(owner), why, "enrol on a new connection")).response
    try:
        return answer(await asyncio.to_thread(_view, folder, body, owner))
    except InputError as error:
        return refusal(422, *error.problems)  # Signed as well, or the agent would not believe it.


def _view(folder: Path, request: bytes | None, owner: Identity | None) -> CertificateView:
    authority = Authority.open(folder)
    signed = b"" if request is None else authority.enrol(request, owner)
    return CertificateView(signed.decode(), (folder / REVOKED).read_text(encoding="ascii"))
