"""Handler of ``/v1/goodput``: what paid GPU time was spent on."""

from __future__ import annotations

from aiohttp import web

from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.responses import answer
from sailord.api.handlers.context import CONTEXT


async def show_goodput(request: web.Request) -> web.Response:
    """Show what every paid second of every GPU was spent on, and every dollar."""
    books = request.app[CONTEXT].goodput
    return answer(goodput_view(books.ledger, books.shares, last_hour=books.last_hour))
