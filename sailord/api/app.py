"""Assembles the web applications: authentication, load limits, and errors as JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from agents.rpc.identity import CallerRole
from agents.rpc.server import Handler, refuse_stranger
from agents.rpc.strangers import AUTHENTICATED, charge, note_authenticated
from agents.rpc.unsigned_bodies import BODY_S, UNSIGNED, LateBody
from agents.store.interface import StoreError
from sailord.api.access.callers import (
    CALLER,
    STILL_ADMITTED,
    Caller,
    caller_at,
    caller_named,
    caller_with,
)
from sailord.api.access.load_limits import LOAD, Load
from sailord.api.answers.responses import BODY_BYTES_MAX, Refusal, refusal, too_many
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.live import LIVE, LiveDocuments
from sailord.api.handlers.timeline import MEASURED, MeasuredSchedules
from sailord.api.leader_proxy import keep_session, pass_on
from sailord.api.route import Route
from sailord.api.routes import ROUTES, route_of
from sailord.checkpoints.object_storage import StorageError
from sailord.tokens import may
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord.api")

PATH_MAX = 200
"""Characters of an unknown path that the answer repeats."""
FOR_AGENTS: dict[str, tuple[CallerRole, ...]] = {"report": ("agent",), "read_part": ("agent",)}
"""Routes that agents sign, and that need an agent's certificate, too."""
SEE = "GET /openapi.json lists all addresses"
SHOW_TOKEN = "send Bearer <token>; sailorctl reads it from --token-file"


@web.middleware
async def time_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count and time requests by address and status, but not streams, which last."""
    began = time.perf_counter()
    answer = await handler(request)
    if isinstance(answer, web.Response):
        route = route_of(request)
        name = "unknown" if route is None else route.name
        times = request.app[CONTEXT].request_times.labels(name, answer.status)
        times.observe(time.perf_counter() - began)
    return answer


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into a refusal; none shows internals."""
    path = request.path[:PATH_MAX]
    try:
        return await handler(request)
    except InputError as error:
        return refusal(422, *error.problems)
    except web.HTTPRequestEntityTooLarge:
        is_job = request.path == "/v1/jobs"
        cure = "name data files in the job instead of embedding them" if is_job else "send less"
        return refusal(413, Problem("body", f"is larger than {BODY_BYTES_MAX} bytes", cure))
    except Refusal as error:
        return error.response
    except LateBody:
        what = f"did not arrive within {BODY_S:g} s, or was dropped under load"
        return refusal(408, Problem("body", what, "send it together with the head"))
    except web.HTTPNotFound:
        return refusal(404, Problem(path, "unknown address", SEE))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = Problem(path, f"does not support {error.method[:20]}", f"use {allowed}; {SEE}")
        return refusal(405, problem, headers={"Allow": allowed})
    except web.HTTPException as error:
        return refusal(error.status, Problem(path, error.reason, SEE))
    except StoreError as error:
        cure = "retry in 5 s; jobs continue meanwhile"
        problem = Problem("the store", f"is unavailable: {error}", cure)
        return refusal(503, problem, headers={"Retry-After": "5"})
    except StorageError as error:
        cure = "check that it is reachable from this host, then retry"
        return refusal(502, Problem("checkpoint storage", str(error), cure))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("request failed", method=request.method, path=request.path)
        problem = Problem("sailord", "internal error", "see sailord's log, and report it")
        return refusal(500, problem)


@web.middleware
async def check_sender(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Over TCP, require a certificate and the token, and let strangers cost little.

    The answer to an unauthenticated request closes the connection: requests that were sent on it
    already are dropped.
    """
    route = route_of(request)
    answer: web.StreamResponse
    if why := _wrong_certificate(request, route):
        charge(request, "certificate")
        answer = refusal(403, why)
        answer.force_close()
        return answer
    if route is None or route.auth == "token":
        api = request.app[CONTEXT]
        named = caller_named(request, api.verifier)
        caller = named or caller_with(api.tokens, request.headers.get("Authorization", ""))
        if caller is not None:
            note_authenticated(request)
            request[STILL_ADMITTED] = lambda: _is_admitted(request, route, named)
            return _lacks_role(request, route, caller) or await handler(request)
        charge(request, "token")
        problem = Problem(
            "Authorization", "the token is missing or wrong, or has expired", SHOW_TOKEN
        )
        answer = refusal(401, problem, headers={"WWW-Authenticate": "Bearer"})
    elif route.auth == "none" and not charge(request, ""):
        answer = too_many("requests").response
    else:
        answer = await handler(request)
        if AUTHENTICATED in request:
            return answer
        if route.auth == "signature":
            charge(request, "signature")
    answer.force_close()
    return answer


def _is_admitted(request: web.Request, route: Route | None, named: Caller | None) -> bool:
    """Whether certificate, token and role of a request are valid at this moment."""
    tokens = request.app[CONTEXT].tokens
    caller = named or caller_with(tokens, request.headers.get("Authorization", ""))
    is_known = caller is not None and (route is None or may(caller.role, route.role))
    return is_known and _wrong_certificate(request, route) is None


def _wrong_certificate(request: web.Request, route: Route | None) -> Problem | None:
    """Return why this address does not take the caller's certificate; ``None`` if it does."""
    roles: tuple[CallerRole, ...] = ("user", "sailord")
    if route is not None and route.auth != "token":
        roles = FOR_AGENTS.get(route.name, ())
    why = refuse_stranger(request, *roles) if roles else ""
    cure = f"use one of role {' or '.join(roles)} (sailorctl ca issue; --tls FOLDER)"
    return Problem("certificate", why, cure) if why else None


def _lacks_role(request: web.Request, route: Route | None, caller: Caller) -> web.Response | None:
    """Refuse what the caller's role does not include."""
    request[CALLER] = caller
    if route is None or may(caller.role, route.role):
        return None
    what = f"{caller.name} is a {caller.role}; this needs a {route.role}"
    return refusal(403, Problem("role", what, "ask an admin for a token of that role"))


@web.middleware
async def check_local(request: web.Request, handler: Handler) -> web.StreamResponse:
    """On the Unix socket, ask the kernel who calls."""
    route, api = route_of(request), request.app[CONTEXT]
    if route is not None and route.auth != "token":
        return await handler(request)
    caller = caller_at(request, api.config)
    if caller is None:
        api.strangers.refuse("the Unix socket", "user")
        cure = "use a token over TCP, or join a group that sailord.toml names under [listen]"
        return refusal(403, Problem("user", "is not known to sailord", cure))
    request[STILL_ADMITTED] = lambda: caller_at(request, api.config) is not None
    return _lacks_role(request, route, caller) or await handler(request)


@web.middleware
async def limit_load(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 429 when too many requests are in progress, at addresses that need a token."""
    route = route_of(request)
    if route is not None and route.auth != "token":
        return await handler(request)
    load = request.app[LOAD]
    if load.is_full:
        raise too_many("requests")
    with load.counted():
        return await handler(request)


def build_app(api: ApiContext) -> web.Application:
    """The application for the Unix socket, where the kernel names the caller."""
    return _build(api, [check_local, answer_errors, limit_load])


def build_public_app(api: ApiContext) -> web.Application:
    """The application for TCP; protected by certificates and tokens."""
    return _build(api, [check_sender, answer_errors, limit_load])


def _build(
    api: ApiContext, middlewares: list[Callable[..., Awaitable[web.StreamResponse]]]
) -> web.Application:
    app = web.Application(
        middlewares=[time_requests, *middlewares, pass_on], client_max_size=BODY_BYTES_MAX
    )
    app[CONTEXT] = api
    app[LOAD] = Load()
    app[LIVE] = LiveDocuments()
    app[MEASURED] = MeasuredSchedules()
    app[UNSIGNED] = {}
    app.cleanup_ctx.append(keep_session)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler, name=route.name)
    return app
