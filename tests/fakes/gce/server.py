"""The fake cloud as an HTTP server in a thread, with advancing time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from tests.fakes.gce.cloud import Cloud
from tests.fakes.gce.rest import Request, Rest

TICK_S = 0.01


def _app(rest: Rest) -> web.Application:
    async def handle(asked: web.Request) -> web.StreamResponse:
        body = await asked.json() if asked.can_read_body else {}
        request = Request(asked.method, asked.path, asked.query, body)
        failure = rest.injected_failure(request)
        if failure is not None:
            await asyncio.sleep(failure.delay_s)
        reply = rest.respond(request, failure)
        return web.json_response(reply.body, status=reply.status, headers=reply.headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    return app


@contextlib.contextmanager
def gce_server(cloud: Cloud, rest: Rest | None = None) -> Iterator[str]:
    """Serve one cloud; the value is its address, ``http://127.0.0.1:PORT``.

    Due events, hooks included, run in this thread without a request.
    """
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), [""]
    face = rest or Rest(cloud)

    async def serve(stopped: asyncio.Event) -> None:
        runner = web.AppRunner(_app(face), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address[0] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        try:
            while not stopped.is_set():
                cloud.advance()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), TICK_S)
        finally:
            await runner.cleanup()
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            for task in (
                waiting
            ):  # The last client may have closed its connection without waiting for the answer.
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(stopped)), daemon=True)
    thread.start()
    assert ready.wait(20), "the fake did not start"
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(20)
        loop.close()
