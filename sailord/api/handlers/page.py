"""Handlers of ``/`` and ``/page/``: the files of the page in the browser, which hold no secret."""

from __future__ import annotations

from aiohttp import web

from sailord.api.answers.responses import Refusal
from sailord.page.files import page_files
from simulator.documents.problems import Problem

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Allows nothing from other servers, no inline code, and no embedding in a frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


async def page(request: web.Request) -> web.Response:
    """Serve the page for a browser."""
    return _file(request, "index.html")


async def page_file(request: web.Request) -> web.Response:
    """Serve a file of the page."""
    return _file(request, request.match_info["file"])


def _file(request: web.Request, name: str) -> web.Response:
    found = page_files().get(name)
    if found is None:
        raise Refusal(404, Problem(name[:64], "is not a file of the page", "open / instead"))
    headers = {**HEADERS, "ETag": f'"{found.tag}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    body = found.body
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers["Content-Encoding"] = found.zipped, "gzip"
    return web.Response(
        body=body, content_type=found.content_type, charset="utf-8", headers=headers
    )
