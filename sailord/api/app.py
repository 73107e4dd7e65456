"""The web application: who may ask, how large, how often, and how mistakes are answered."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from agents.daemon.clock import Clock
from agents.protocol.codec import plain
from agents.protocol.records import Leader
from agents.rpc.signing import Verifier
from agents.store import StoreError, StoreUnavailable
from sailord.api.load_limits import BODY_S, DOOR, BodyLate, Door
from sailord.api.types import Problems, ProblemView
from sailord.capacity.loop import CapacityLoop
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.controller.loop import Shell
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord.api")

BODY_BYTES_MAX = 1 << 20
BURST = 200.0
PER_S = 50.0
"""How many webhooks are taken from one address."""
SENDERS_MAX = 10_000

PATH_MAX = 200
"""So much of a strange address is repeated in the answer."""
SEE = "GET /openapi.json tells all addresses"
SHOW_TOKEN = "send Bearer <token>; sailorctl takes its file as --token-file"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Bucket:
    """How much one sender may still ask for."""

    left: float = BURST
    at: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether one more is allowed now."""
        now = time.monotonic()
        self.left = min(BURST, self.left + (now - self.at) * PER_S)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(eq=False)
class Api:
    """What the handlers stand on."""

    config: Config
    shell: Shell
    own_gateway: Gateway
    clock: Clock
    key: bytes
    woken: asyncio.Event
    """Set so that the store is read now."""
    procurer: CapacityLoop | None = None
    """Only where a provider is configured."""
    leader: Leader | None = None
    plans_seen: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = field(
        default_factory=dict
    )
    """The plan that was shown last, with what the planner said of it."""
    verifier: Verifier = field(init=False)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.key)

    @property
    def gateway(self) -> Gateway:
        """The way to the store; while it is known to be away, nobody waits for it."""
        store = self.shell.store
        if not store.is_available:
            raise StoreUnavailable(store.error or "it does not answer")
        return self.own_gateway

    def allows(self, sender: str) -> bool:
        """Whether the sender has not asked too often."""
        if sender not in self.buckets and len(self.buckets) >= SENDERS_MAX:
            self.buckets.clear()
        return self.buckets.setdefault(sender, Bucket()).take()


API = web.AppKey("api", Api)


class NotThere(Exception):  # noqa: N818 - an answer like any other: what was named is not there
    """What the address names is not there; answered with 404."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def refusal(status: int, *problems: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """An answer that says what is wrong, in the one form that all mistakes have."""
    listed = tuple(ProblemView(each.place, each.what, each.cure) for each in problems)
    return answer(Problems(listed), status=status, headers=headers)


AGAIN = {"Retry-After": "1"}


def too_many(what: str) -> web.Response:
    """An answer to who must wait."""
    return refusal(429, Problem(what, "are too many at once", "try again in a second"),
                   headers=AGAIN)  # fmt: skip


def answer(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """An answer in JSON; ``value`` is one of the shapes, or plain."""
    text = json.dumps(plain(value), allow_nan=False)
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


@web.middleware
async def tell_mistakes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No answer ever shows how we are made."""
    try:
        return await handler(request)
    except InputError as error:
        return refusal(422, *error.problems)
    except web.HTTPRequestEntityTooLarge:
        is_job = request.path == "/v1/jobs"
        cure = "a job's file names its data and does not hold it" if is_job else "send less"
        return refusal(413, Problem("body", f"is larger than {BODY_BYTES_MAX} bytes", cure))
    except BodyLate:
        what = f"did not come within {BODY_S:g} s, or others needed the place"
        return refusal(408, Problem("body", what, "send it together with the head"))
    except NotThere as error:
        return refusal(404, error.problem)
    except web.HTTPNotFound:
        problem = Problem(request.path[:PATH_MAX], "is no address of ours", SEE)
        return refusal(404, problem)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = Problem(
            request.path[:PATH_MAX], f"does not take {error.method[:20]}", f"use {allowed}; {SEE}"
        )
        return refusal(405, problem, headers={"Allow": allowed})
    except web.HTTPException as error:
        return refusal(error.status, Problem(request.path[:PATH_MAX], error.reason, SEE))
    except StoreError as error:
        cure = "try again in some seconds; jobs go on meanwhile"
        problem = Problem("the store", f"is away: {error}", cure)
        return refusal(503, problem, headers={"Retry-After": "5"})
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("a request failed", method=request.method, path=request.path)
        return refusal(500, Problem("sailord", "has a fault", "see its log, and report it"))


@web.middleware
async def ask_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Over TCP, clients show the token; some doors have locks of their own."""
    if getattr(request.match_info.route, "name", None) in OWN_LOCK:
        return await handler(request)
    token = request.app[API].config.token
    shown = request.headers.get("Authorization", "")
    expected = b"Bearer " + (token or b"")
    if token is None or not hmac.compare_digest(shown.encode("utf-8", "replace"), expected):
        problem = Problem("Authorization", "the token is missing or wrong", SHOW_TOKEN)
        return refusal(401, problem, headers={"WWW-Authenticate": "Bearer"})
    return await handler(request)


OWN_LOCK = frozenset(
    {"livez", "readyz", "openapi", "report", "webhook_preemption", "webhook_capacity"}
)
"""Routes that ask for no token: they are harmless, or check signatures themselves."""


@web.middleware
async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn away who comes when too many are inside; nobody is counted who has shown nothing."""
    if request.match_info.route.name in OWN_LOCK:
        return await handler(request)
    door = request.app[DOOR]
    if door.is_full:
        return too_many("requests")
    with door.entered():
        return await handler(request)


def build_app(api: Api) -> web.Application:
    """The application for the Unix socket: whoever may open it may do everything."""
    return _build(api, [tell_mistakes, count])


def build_public_app(api: Api) -> web.Application:
    """The application for TCP."""
    return _build(api, [tell_mistakes, ask_token, count])


def _build(
    api: Api, middlewares: list[Callable[..., Awaitable[web.StreamResponse]]]
) -> web.Application:
    # The handlers stand on this module.
    from sailord.api.leader_proxy import keep_session, pass_on  # noqa: PLC0415 - see above
    from sailord.api.routes import ROUTES  # noqa: PLC0415 - see above

    app = web.Application(
        middlewares=[*middlewares, pass_on],
        client_max_size=BODY_BYTES_MAX,
    )
    app[API] = api
    app[DOOR] = Door()
    app.cleanup_ctx.append(keep_session)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler, name=route.name)
    return app
