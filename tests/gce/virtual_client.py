"""Google's client library without a network, a virtual event loop, an in-memory store."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import requests
from google.auth.credentials import AnonymousCredentials
from requests.adapters import HTTPAdapter

from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.records import Order
from agents.protocol.store_keys import Keys
from agents.store.interface import Entry, StoreUnavailable
from sailord.providers.gce.client import GceClient, raise_gce_error
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.partial_lists import with_partial_results
from tests.fakes.gce.rest import Request, Rest


class _Selector(selectors.SelectSelector):
    """Advances the virtual clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "the loop waits for an event that no timer or request can cause"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only while all tasks wait."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class FakeAdapter(HTTPAdapter):
    """Answers requests from the fake, without a network."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self._rest = rest

    def send(self, request: requests.PreparedRequest, *_: Any, timeout: float, **__: Any) -> Any:
        assert timeout > 0, "a request without a timeout"
        sent = with_partial_results(request)
        address, body = urlsplit(sent.url), json.loads(sent.body or "{}")
        asked = Request(sent.method, unquote(address.path), dict(parse_qsl(address.query)), body)
        reply = self._rest.respond(asked, self._rest.injected_failure(asked))
        response = requests.Response()
        response.status_code, response.request, response.url = reply.status, sent, sent.url
        response.headers.update(reply.headers)
        response._content = json.dumps(reply.body).encode()
        return response


class VirtualClient(GceClient):
    """The client library without threads: requests take virtual time, and may arrive late."""

    def __init__(
        self, rest: Rest, config: GceConfig, lag: Callable[[], tuple[float, float]]
    ) -> None:
        super().__init__(AnonymousCredentials(), replace(config, endpoint="http://fake"))
        self._rest = rest
        self._lag = lag
        self._on_its_way: set[asyncio.Task[Any]] = set()

    def _client(self, name: str) -> Any:
        is_new = name not in self._clients
        client = super()._client(name)
        if is_new:
            session = client.transport._session
            session.trust_env = False
            session.mount("http://", FakeAdapter(self._rest))
        return client

    async def _in_thread(self, act: Callable[[], Any], *, share: float = 1.0) -> Any:
        # The caller may have ended or timed out when the request arrives.
        task = asyncio.create_task(self._travel(act))
        self._on_its_way.add(task)
        task.add_done_callback(self._on_its_way.discard)
        try:
            answer = await asyncio.wait_for(asyncio.shield(task), share * self._call_s)
        except TimeoutError:
            raise GceError("unknown", "Google did not answer in time") from None
        if isinstance(answer, GceError):
            raise answer
        return answer

    async def _travel(self, act: Callable[[], Any]) -> Any:
        there_s, back_s = self._lag()
        await asyncio.sleep(there_s)
        try:
            answer = raise_gce_error(act)
        except GceError as failure:
            answer = failure
        await asyncio.sleep(back_s)
        return answer


class Gateway:
    """A fake of the store: one value, and the leader's term."""

    def __init__(self, is_away: Callable[[], bool], obey: Callable[[Order], None]) -> None:
        self.keys = Keys("test")
        self.store = self
        self.unreadable = UnreadableRecords()
        self.term = 0
        self._follow_order = obey
        self._is_away = is_away
        self._value: bytes | None = None

    async def get(self, key: str) -> Entry | None:
        await self._reach()
        return None if self._value is None else Entry(key, self._value, 1, 1)

    async def write_as_leader(self, term: int, orders: list[Any]) -> bool:
        await self._reach()
        if term == self.term:
            self._value = orders[0].value
        return term == self.term

    async def give_order(self, order: Order) -> None:
        await self._reach()
        self._follow_order(order)

    async def read_spec(self, job: str) -> str:
        await self._reach()
        return job

    async def _reach(self) -> None:
        await asyncio.sleep(0.02)
        if self._is_away():
            raise StoreUnavailable("as scripted")
