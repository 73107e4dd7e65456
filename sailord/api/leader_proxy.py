"""A sailord that does not lead passes on what it is asked to the one that does.

Whoever asks need not know who leads: any sailord of the cluster gives the same answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from yarl import URL

from sailord.api.app import API, OWN_LOCK, Handler, refusal
from sailord.api.load_limits import DOOR, read_body, read_unsigned
from simulator.documents.problems import Problem

OWN_VIEW = frozenset({"livez", "readyz", "metrics", "openapi", "report", "webhook_preemption"})
"""Routes that each sailord answers for itself: they are about it, or need the store alone."""
WITHOUT_LEADER = frozenset({"status", "submit"})
"""Routes that also make sense while nobody leads: who leads, and what waits for one who does."""
MARK = "Sailor-Passed-On"
"""Set on what is passed on, which goes one step and no further."""
REQUEST_HEADERS = ("Authorization", "Content-Type", "Last-Event-ID", "Sailor-Webhook")
REPLY_HEADERS = (
    "Content-Type", "Cache-Control", "Location", "Retry-After", "Sailor-Log-Mark",
    "X-Accel-Buffering",
)  # fmt: skip
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=60.0)
"""A stream of events has no end, and gives a sign of life every 15 s."""
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def keep_session(app: web.Application) -> AsyncIterator[None]:
    """One way out for as long as the application lives."""
    async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as session:
        app[SESSION] = session
        yield


@web.middleware
async def pass_on(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what only the leader knows as the leader does."""
    api = request.app[API]
    route = request.match_info.route.name
    is_ours = route is None or route in OWN_VIEW
    if is_ours or api.shell.state.term is not None:
        return await handler(request)
    leader, is_away = api.leader, not api.shell.store.is_available
    if leader is None or leader.address == api.config.address or MARK in request.headers:
        # While the store is away nobody knows more than who led last; who never did knows nothing.
        if route in WITHOUT_LEADER or (is_away and api.shell.shown.term is not None):
            return await handler(request)
        what = "nobody leads yet" + (", and the store is away" if is_away else "")
        problem = Problem("sailord", what, "try again in some seconds")
        return refusal(503, problem, headers={"Retry-After": "1"})
    try:
        return await _ask(request, leader.address)
    except (aiohttp.ClientError, TimeoutError) as error:
        what = f"at {leader.address}, does not answer: {error or type(error).__name__}"
        cure = "try again in some seconds: if it is gone, another one will lead"
        if is_away:
            cure = "the store cannot be reached from here either: ask another sailord"
        problem = Problem("the sailord that leads", what, cure)
        return refusal(503, problem, headers={"Retry-After": "5"})


async def _ask(request: web.Request, address: str) -> web.StreamResponse:
    api = request.app[API]
    headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
    headers[MARK] = "1"
    if api.config.token is not None:
        # Over the Unix socket none is shown; the leader's door is the one over TCP.
        headers.setdefault("Authorization", f"Bearer {api.config.token.decode('ascii')}")
    url = URL(f"http://{address}{request.rel_url.raw_path_qs}", encoded=True)
    is_stranger = request.match_info.route.name in OWN_LOCK
    body = await (read_unsigned if is_stranger else read_body)(request)
    async with request.app[SESSION].request(
        request.method, url, data=body, headers=headers, allow_redirects=False
    ) as said:
        kept = {name: said.headers[name] for name in REPLY_HEADERS if name in said.headers}
        if said.content_length is not None:
            return web.Response(body=await said.read(), status=said.status, headers=kept)
        reply = web.StreamResponse(status=said.status, headers=kept)
        await reply.prepare(request)
        try:
            with request.app[DOOR].aside():
                async for part in said.content.iter_any():
                    await reply.write(part)
        except (ConnectionError, aiohttp.ClientError, TimeoutError):
            return reply  # One of both ends has gone; whoever listened asks again where it was.
        return reply
