"""sailord calls a real agent, and accepts only answers signed with the cluster's key."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agents.protocol.records import Abort, Fence, NodeId, NodeRecord
from agents.rpc.client import CallFailed
from agents.rpc.signing import REPLY_HEADER, REQUEST_HEADER, Verifier, sign_reply
from sailord.controller.agent_client import AgentClient
from tests.agents.running import JOB, KEY, OTHER_KEY, place


async def test_agent_answers_only_requests_signed_with_the_clusters_key(tmp_path):
    client, stranger = AgentClient(KEY), AgentClient(OTHER_KEY)
    async with place(tmp_path) as here:
        here.start()
        node = await here.ready()
        assert (await client.report(node)).node == node.id
        await client.wake(node)
        await client.abort(node, Abort(JOB, Fence(0, 1)))
        with pytest.raises(CallFailed, match="answered 404"):
            await client.call(node, "GET", "/v1/nothing")
        with pytest.raises(CallFailed, match="not signed with the cluster's key"):
            await stranger.report(node)
    with pytest.raises(CallFailed, match="/v1/report"):
        await client.report(node)
    await client.close()
    await stranger.close()


@asynccontextmanager
async def one_that_answers(text: bytes):
    """The node of a server that gives this signed answer to every request."""
    verifier = Verifier(KEY, lambda: f"127.0.0.1:{runner.addresses[0][1]}")

    async def say(request: web.Request) -> web.Response:
        header = request.headers[REQUEST_HEADER]
        nonce = verifier.check_request("GET", request.raw_path, b"", header, at=time.time())
        signature = sign_reply(KEY, nonce, 200, text)
        return web.Response(body=text, headers={REPLY_HEADER: signature})

    app = web.Application()
    app.router.add_get("/v1/logs", say)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        yield NodeRecord(NodeId("n1.1"), "n1", "z", "m", "g", 1, address)
    finally:
        await runner.cleanup()


async def test_long_answer_is_read_completely_and_too_long_one_is_an_error():
    client = AgentClient(KEY)
    async with one_that_answers(b"x" * (3 << 20)) as node:
        assert len(await client.call(node, "GET", "/v1/logs", timeout_s=20)) == 3 << 20
    async with one_that_answers(b"x" * ((16 << 20) + 1)) as node:
        with pytest.raises(CallFailed, match="longer than 16777216 bytes"):
            await client.call(node, "GET", "/v1/logs", timeout_s=20)
    await client.close()
