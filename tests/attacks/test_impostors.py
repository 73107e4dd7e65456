"""An agent to which another node's traffic is led poses as that node, under TLS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from agents.links.sender import Sender
from agents.protocol.codec import encode
from agents.protocol.link_records import LinkOrder, Listening
from agents.protocol.records import JobId, NodeId, NodeRecord
from agents.rpc.client import CallFailed, SignedClient
from agents.rpc.signing import REPLY_HEADER, REQUEST_HEADER, ClusterKey, sign_reply
from agents.rpc.tls import Tls
from agents.workers.rendezvous import Rendezvous
from sailord.authority import Authority
from sailord.controller.agent_client import AgentClient
from tests.sailord.certificates import member

KEY = ClusterKey("test", (b"k" * 32,))
JOB = JobId("job")
REFUSED = encode(Listening(busy="is an impostor"))


@contextlib.asynccontextmanager
async def impostor(tls: Tls, heard: list[str]) -> AsyncIterator[str]:
    """The address of an agent that signs an answer to whatever it hears."""

    async def say(request: web.Request) -> web.Response:
        heard.append(request.path)
        nonce = request.headers[REQUEST_HEADER].partition("nonce=")[2][:32]
        return web.Response(
            body=REFUSED, headers={REPLY_HEADER: sign_reply(KEY, nonce, 200, REFUSED)}
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", say)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_agent_cannot_pose_as_another_to_sailord_or_to_agents(tmp_path, cost):
    authority = Authority.create(tmp_path / "ca", "test")
    head = member(authority, "sailord", "head", tmp_path / "head")
    evil, own = (member(authority, "agent", each, tmp_path / each) for each in ("evil", "own"))
    heard: list[str] = []
    async with impostor(evil, heard) as address, aiohttp.ClientSession() as session:
        sailord, agent = AgentClient(KEY, head), SignedClient(session, KEY, tls=own)
        sender, rendezvous = Sender(agent), Rendezvous(agent)

        async def reached(name: str) -> str:
            """Call the agent of a node at the impostor's address; return what was refused."""
            node = NodeRecord(NodeId(f"{name}.1"), name, "z", "box", "A100-40", 1, address)
            order = LinkOrder(address, 1, False, (1,), 9, 1.0, 1e15, 0.01, name)
            try:
                await sailord.call(node, "GET", "/v1/report")
            except CallFailed as error:
                assert await rendezvous.ask(address, name, JOB, 1) is None
                assert (await sender.measure(order)).broken
                return str(error)
            assert await rendezvous.ask(address, name, JOB, 1) == REFUSED.decode()
            assert (await sender.measure(order)).busy == "the peer is an impostor"
            return ""

        assert "the certificate is of another member" in await reached("victim")
        assert heard == []
        assert await reached("evil") == "", "under its own name it may answer"
        assert heard == ["/v1/report", f"/v1/meeting/{JOB}/1", "/v1/links/listen"]
        await sailord.close()
    cost("an agent that poses as another", "any agent's answer was taken", "refused, unheard")
