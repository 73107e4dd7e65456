"""Passes requests on to the leader, so that a client may ask any sailord of the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from yarl import URL

from agents.rpc.client import scheme_of, tls_of
from agents.rpc.server import Handler
from agents.rpc.tls import explain
from agents.rpc.unsigned_bodies import read_in_time
from sailord.api.access.callers import caller_of, name_caller, name_of
from sailord.api.access.load_limits import LOAD
from sailord.api.answers.responses import refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.webhook_message import read_message
from sailord.api.routes import route_of
from simulator.documents.problems import Problem

MARK = "Sailor-Passed-On"
"""Header of a request that was passed on; it is not passed on again."""
REQUEST_HEADERS = ("Authorization", "Content-Type", "Last-Event-ID", "Sailor-Webhook")
REPLY_HEADERS = (
    "Content-Type", "Cache-Control", "Location", "Retry-After", "Sailor-Log-Mark",
    "Sailor-Log-Ended",
    "X-Accel-Buffering",
)  # fmt: skip
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=60.0)
"""An event stream never ends, but sends a keepalive every 15 s."""
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def keep_session(app: web.Application) -> AsyncIterator[None]:
    """Keep one client session for as long as the application runs."""
    async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as session:
        app[SESSION] = session
        yield


@web.middleware
async def pass_on(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer the request here, or have the leader answer it."""
    api, route = request.app[CONTEXT], route_of(request)
    if route is None or route.served_by == "any" or api.cluster.state.term is not None:
        return await handler(request)
    leader, is_down = api.cluster.leader, not api.cluster.store.is_available
    has_led = api.cluster.last_led.term is not None
    if leader is None or leader.address == api.config.address or MARK in request.headers:
        # While the store is unavailable, the last leader answers from what it knew.
        if route.served_by == "leader_if_elected" or (is_down and has_led):
            return await handler(request)
        what = "no leader elected yet" + (", and the store is unavailable" if is_down else "")
        cure = f"retry in about {api.config.options.lease_s:g} s"
        return refusal(503, Problem("sailord", what, cure), headers={"Retry-After": "1"})
    if route.auth == "signature":
        # A webhook: the leader would count a stranger's requests against this sailord.
        await read_message(request)
    try:
        return await _ask_leader(request, leader.address)
    except (aiohttp.ClientError, TimeoutError) as error:
        what = f"at {leader.address}, does not answer: {explain(error)}"
        cure = "retry in some seconds: if it is dead, another leader will be elected"
        if is_down:
            cure = "the store is not reachable from this host either: ask another sailord"
        problem = Problem("the leader", what, cure)
        return refusal(503, problem, headers={"Retry-After": "5"})


async def _ask_leader(request: web.Request, address: str) -> web.StreamResponse:
    api = request.app[CONTEXT]
    headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
    headers[MARK] = "1"
    caller = caller_of(request)
    if api.tls is not None and caller is not None and "Authorization" not in headers:
        # It came over the Unix socket.
        path = request.rel_url.raw_path_qs
        headers |= name_caller(caller, api.key, address, request.method, path)
    if api.config.token is not None:
        # Without TLS, and for a leader of an older version: its TCP port requires a token.
        headers.setdefault("Authorization", f"Bearer {api.config.token.decode('ascii')}")
    url = URL(f"{scheme_of(api.tls)}://{address}{request.rel_url.raw_path_qs}", encoded=True)
    body = await read_in_time(request)
    async with request.app[SESSION].request(
        request.method,
        url,
        data=body,
        headers=headers,
        allow_redirects=False,
        **tls_of(api.tls, "sailord"),
    ) as said:
        kept = {name: said.headers[name] for name in REPLY_HEADERS if name in said.headers}
        if said.content_length is not None:
            return web.Response(body=await said.read(), status=said.status, headers=kept)
        reply = web.StreamResponse(status=said.status, headers=kept)
        await reply.prepare(request)
        try:
            with request.app[LOAD].streaming(name_of(request)):
                async for part in said.content.iter_any():
                    await reply.write(part)
        except (ConnectionError, aiohttp.ClientError, TimeoutError):
            return reply  # Client or leader disconnected; the client resumes where it was.
        return reply
