"""The server's side of signed HTTP: checks requests and signs the answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from agents.rpc.identity import CallerRole
from agents.rpc.signing import REPLY_HEADER, REQUEST_HEADER, SignatureError, Verifier, sign_reply
from agents.rpc.strangers import note_authenticated
from agents.rpc.tls import peer_of, why_refused
from agents.rpc.unsigned_bodies import read_unsigned

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def unauthorized(error: SignatureError) -> web.Response:
    """Return a 401 answer in plain text."""
    return web.Response(status=401, text=f"{error}\n")


def refuse_stranger(request: web.Request, *roles: CallerRole) -> str:
    """Return why the caller's certificate does not suffice; over plain HTTP none is asked for."""
    transport = request.transport
    if transport is None:
        return "the connection has ended"
    if transport.get_extra_info("sslcontext") is None:
        return ""
    peer = peer_of(transport)
    if peer is None:
        return "show a certificate of this cluster's authority"
    if why := why_refused(transport):
        return why
    if peer.role not in roles:
        return f"the certificate is of {peer}, which may not do this"
    return ""


async def answer_signed(
    request: web.Request,
    verifier: Verifier,
    handler: Handler,
    *,
    read_body: Callable[[web.Request], Awaitable[bytes]] = read_unsigned,
    refuse: Callable[[SignatureError], web.Response] = unauthorized,
) -> web.StreamResponse:
    """Check the request's signature, call the handler, and sign its answer."""
    header = request.headers.get(REQUEST_HEADER)
    try:
        verifier.check_header(header, at=time.time())
        body = await read_body(request)
        nonce = verifier.check_request(
            request.method, request.raw_path, body, header, at=time.time()
        )
    except SignatureError as error:
        return refuse(error)
    note_authenticated(request)
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        answer = web.Response(status=error.status, text=error.text)
    assert isinstance(answer, web.Response), "a stream cannot be signed"
    assert isinstance(answer.body, bytes | None)
    signature = sign_reply(verifier.key, nonce, answer.status, answer.body or b"")
    answer.headers[REPLY_HEADER] = signature
    return answer
