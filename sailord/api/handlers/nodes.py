"""Handlers of ``/v1/nodes``: list, order, and the workers' logs."""

from __future__ import annotations

import re
from dataclasses import replace

from aiohttp import web

from agents.protocol.codec import WireError, decode
from agents.protocol.records import Output
from agents.rpc.client import CallFailed
from sailord.api.answers import render
from sailord.api.answers.losses import losses_of_parts
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.orders import handle_order
from sailord.core.model.nodes import Node
from simulator.documents.problems import InputError, Problem, nearest

MARK_HEADER = "Sailor-Log-Mark"
ENDED_HEADER = "Sailor-Log-Ended"
GONE = "if it comes back, it joins as a new node; see sailorctl events"
KEPT_THERE = (
    "its logs are on that machine: journalctl -u sailor-agent, and process/*/output in its agent's "
    "state folder or worker_folder (of sailorctl up: NAME.log and NAME/process in its --folder)"
)
LOG_MARK = r"[A-Za-z0-9.:,_-]{0,4000}"


async def list_nodes(request: web.Request) -> web.Response:
    """List all nodes."""
    api = request.app[CONTEXT]
    nodes, found = api.own_gateway.keys.nodes, api.own_gateway.unreadable.found
    unreadable = {k.removeprefix(nodes): why for k, why in found.items() if k.startswith(nodes)}
    state, parts = api.cluster.last_led, api.cluster.led_parts
    losses, feed = losses_of_parts(parts, api.cluster.following), api.cluster.feed.kept
    view = render.nodes_view(state, unreadable, losses, parts=parts, feed=feed)
    lost = {node.name for node in api.cluster.lost_nodes.of(api.clock.now())}
    return answer(replace(view, lost=tuple(sorted(lost - {node.name for node in view.nodes}))))


async def show_node(request: web.Request) -> web.Response:
    """Show the nodes of one id or name: one that rejoined has a new id."""
    ids = {node.record.id for node in nodes_of(request)}
    cluster = request.app[CONTEXT].cluster
    losses = losses_of_parts(cluster.led_parts, cluster.following)
    parts, feed = cluster.led_parts, cluster.feed.kept
    view = render.nodes_view(cluster.last_led, losses=losses, only=ids, parts=parts, feed=feed)
    return answer(view)


async def list_scrape_targets(request: web.Request) -> web.Response:
    """List the agents to scrape, for Prometheus' `http_sd_configs`."""
    return answer(render.scrape_targets_view(request.app[CONTEXT].cluster.last_led))


async def order_node(request: web.Request) -> web.Response:
    """Drain, cordon or uncordon a node, give it a preemption notice or withdraw one."""
    nodes_of(request)
    return await handle_order(request, request.match_info["node"])


def nodes_of(request: web.Request, cure: str = GONE) -> list[Node]:
    """The node in the path, by id or name; answered with 404 if there is none.

    ``cure``: what to do if it has left.
    Several nodes may have one name: a node that rejoined has a new id. The present one comes first.
    """
    name = request.match_info["node"]
    nodes = request.app[CONTEXT].cluster.last_led.nodes.values()
    found = [node for node in nodes if name in (node.record.id, node.record.name)]
    if not found:
        events = request.app[CONTEXT].cluster.feed.kept
        last = next((each for each in reversed(events) if each.node == name), None)
        if last is not None:
            raise Refusal(404, Problem(name, f"no such node any more: {last.text}", cure))
        known = nearest(name[:64], (node.record.name for node in nodes))
        raise Refusal(404, Problem(name[:64], "no such node", known))
    return sorted(found, key=lambda node: (node.is_lost, -node.since))


async def logs(request: web.Request) -> web.Response:
    """Show the end of the workers' logs on a node, or what was written since a mark.

    With ``setup=true`` show what the setup commands of the job wrote there, with ``ended=true``
    what processes wrote that have ended.
    """
    api, name = request.app[CONTEXT], request.match_info["node"]
    rank, mark = request.query.get("rank", ""), request.query.get("after", "")
    if not re.fullmatch(r"[0-9]{0,5}", rank, re.ASCII):
        raise InputError(Problem("rank", "invalid rank", "give an integer"))
    if not re.fullmatch(LOG_MARK, mark, re.ASCII):
        raise InputError(Problem("after", "invalid mark", f"give a value of {MARK_HEADER}"))
    others = [name for name in ("setup", "ended") if request.query.get(name) == "true"]
    which = others[0] if others else rank
    for node in nodes_of(request, KEPT_THERE):
        if node.record.address:
            path = f"/v1/logs/{which}".rstrip("/") + (mark and f"?after={mark}")
            try:
                said = await api.cluster.agents.call(node.record, "GET", path)
                written = decode(Output, said)
            except (CallFailed, WireError) as error:
                cure = "check that sailor-agent runs there and is reachable from this host"
                cure = KEPT_THERE if node.is_lost else cure
                what = f"its agent did not answer: {error}"
                return refusal(502, Problem(node.record.name, what, cure))
            if which == "setup" and not written.parts and not mark:
                cure = "its job has no setup commands, or the node has not begun"
                raise Refusal(404, Problem(node.record.name, "no log of a setup", cure))
            if which == "ended" and not written.parts:
                cure = f"sailorctl logs {name} has the last generation; of others 8 are kept"
                raise Refusal(404, Problem(node.record.name, "no log of an ended worker", cure))
            if which.isdecimal() and int(rank) not in written.ranks:
                ranks = ", ".join(map(str, written.ranks))
                cure = f"ranks on this node: {ranks}" if ranks else "no worker has started there"
                raise Refusal(404, Problem(node.record.name, f"no log of rank {rank}", cure))
            headers = {MARK_HEADER: written.mark, ENDED_HEADER: str(written.ended)}
            text = _log_text(written, is_named=not rank and len(written.ranks) > 1)
            return web.Response(text=text, content_type="text/plain", headers=headers)
    raise Refusal(404, Problem(name, "the node has no address", "see sailorctl nodes"))


def _log_text(written: Output, *, is_named: bool) -> str:
    """The logs, each under the rank's name if there are several."""
    parts = ((f"==> rank {part.rank} <==\n" if is_named else "", part) for part in written.parts)
    return "".join(f"{name}{part.text}" for name, part in parts)
