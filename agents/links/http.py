"""The agent's routes for measurements of the network; requests are signed like all others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from agents.links.receiver import FLOWS_MAX, Receiver
from agents.links.sender import Sender
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.link_records import LinkOrder, ListenOrder

T = TypeVar("T", LinkOrder, ListenOrder)


@dataclass(eq=False)
class LinkRoutes:
    """Both ends of measurements."""

    receiver: Receiver
    sender: Sender

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/v1/links/listen", self._listen)
        router.add_post("/v1/links/measure", self._measure)

    async def _listen(self, request: web.Request) -> web.Response:
        return await _carry_out(request, ListenOrder, self.receiver.listen)

    async def _measure(self, request: web.Request) -> web.Response:
        return await _carry_out(request, LinkOrder, self.sender.measure)


def is_possible(order: LinkOrder | ListenOrder) -> bool:
    """Return whether the limits of an order make sense."""
    return order.bytes_max >= 0 and 0 < order.seconds_max <= 60 and 0 < order.look_s <= 10


async def _carry_out(
    request: web.Request, kind: type[T], act: Callable[[T], Awaitable[object]]
) -> web.Response:
    try:
        order = decode(kind, await request.read())
    except WireError as error:
        return web.Response(status=422, text=f"{error}\n")
    if not 1 <= order.flows <= FLOWS_MAX or not is_possible(order):
        return web.Response(status=422, text=f"flows: 1 to {FLOWS_MAX}; limits: above 0\n")
    return web.Response(body=encode(await act(order)))
