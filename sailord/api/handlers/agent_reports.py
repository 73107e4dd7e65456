"""Handler of ``/v1/agents/report``: agents report their state, signed with the cluster's key."""

from __future__ import annotations

from aiohttp import web

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Report
from agents.rpc.server import answer_signed
from agents.rpc.signing import REQUEST_HEADER, SignatureError
from agents.rpc.tls import peer_of
from sailord.api.answers.responses import refusal
from sailord.api.handlers.context import CONTEXT
from simulator.documents.problems import Problem


async def report(request: web.Request) -> web.StreamResponse:
    """Take an agent's report, signed with the cluster's key; the answer is signed too."""
    verifier = request.app[CONTEXT].verifier
    return await answer_signed(request, verifier, _take_report, refuse=refuse_signature)


def refuse_signature(error: SignatureError) -> web.Response:
    """Return a refusal with status 401."""
    cure = "sign with the cluster's key, and check this machine's clock"
    return refusal(401, Problem(REQUEST_HEADER, str(error), cure))


async def _take_report(request: web.Request) -> web.StreamResponse:
    api = request.app[CONTEXT]
    try:
        said = decode(Report, await request.read())
    except WireError as error:
        api.own_gateway.unreadable.note(f"report from {request.remote}", str(error))
        return refusal(422, Problem("body", str(error), "upgrade this sailord first"))
    api.own_gateway.unreadable.clear(f"report from {request.remote}")
    caller = peer_of(request.transport)
    if caller is not None and caller.name != said.node.partition(".")[0]:
        what = f"{said.node} is not a node of {caller}"
        return refusal(403, Problem("node", what, "report with this node's own certificate"))
    term = api.cluster.state.term
    if term is not None:
        api.cluster.put_report(said)
    status, body = 200 if term is not None else 409, encode(api.cluster.answer_to(said))
    return web.Response(body=body, status=status, content_type="application/json")
