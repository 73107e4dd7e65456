"""What each address of the API does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from agents.protocol.codec import WireError, decode, encode, plain
from agents.protocol.names import JOB_ID
from agents.protocol.records import Bill, Intent, IntentKind, JobId, JobRecord, Output, Report
from agents.rpc.client import CallFailed
from agents.rpc.server import answer_signed
from agents.rpc.signing import REQUEST_HEADER, SignatureError
from agents.store import StoreError
from sailord.api import render, types
from sailord.api.app import API, Api, NotThere, answer, refusal
from sailord.api.capacity import glance_of
from sailord.api.load_limits import DOOR, read_body, read_unsigned
from sailord.api.metrics import metrics_text
from sailord.checkpoints.resume import begins_from
from sailord.cluster_records import Transition
from sailord.core.nodes import Node
from sailord.core.order_validation import objection
from sailord.core.state import State
from sailord.notify.feed import Happening
from sailord.planning.job_spec import job_shape, read_job, saving_of
from sailord.planning.job_warnings import warnings_of
from simulator.documents.fields import quote
from simulator.documents.problems import InputError, Problem, nearest

ID = JOB_ID
NAMES = "use letters, digits, dots and hyphens"
PING_S = 15.0
GLANCE_S = 1.0
"""What a status may wait for the store."""
KNOWN_S = 2.0
"""How long news is waited for; it is in the store and comes to be known in any case."""
KINDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false"
}  # fmt: skip
OTHER_ID = Problem("id", "was given with another order or node", "give each order its own id")
MARK_HEADER = "Sailor-Log-Mark"
LOG_MARK = r"[A-Za-z0-9.:,_-]{0,4000}"
PRIORITY_MAX = 1_000_000
LEAVES_MAX = 4e9


async def livez(request: web.Request) -> web.Response:
    """The loop turns."""
    del request
    return answer(types.Live(live=True))


async def readyz(request: web.Request) -> web.Response:
    """Somebody leads, and the store answers."""
    api = request.app[API]
    if not api.shell.store.is_available:
        return refusal(503, Problem("the store", "is away", "see whether it runs"))
    if api.leader is None:
        return refusal(503, Problem("sailord", "nobody leads yet", "wait for a lease's time"))
    return answer(types.Ready(ready=True, leads=api.shell.state.term is not None))


async def metrics(request: web.Request) -> web.Response:
    """Figures for Prometheus."""
    text = metrics_text(request.app[API])
    return web.Response(text=text, content_type="text/plain", charset="utf-8")


async def status(request: web.Request) -> web.Response:
    """Everything at a glance."""
    api = request.app[API]
    state, now = api.shell.shown, api.clock.now()
    plan, about = await _plan_of(api, state)
    leader = api.leader
    return answer(
        types.Status(
            cluster=api.config.cluster_name,
            at=now,
            leads=api.shell.state.term is not None,
            term=api.shell.state.term,
            leader=None if leader is None else types.LeaderView(leader.host, leader.address),
            store=_store_view(api),
            job=render.active_view(state, api.shell.pace, plan, about, api.shell.outbox.at_of, now),
            queued=sum(job.state == "queued" for job in state.jobs.values()),
            nodes=render.counts_view(state),
            leaving=render.leaving_view(state),
            capacity=glance_of(api),
            unheard=tuple(f"{url}: {why}" for url, why in api.shell.outbox.unheard.items()),
        )
    )


def _store_view(api: Api) -> types.StoreView:
    store = api.shell.store
    trouble = store.refused_write if store.is_available else store.error
    return types.StoreView(store.is_available, store.unavailable_since, trouble)


async def _plan_of(api: Api, state: State) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    active = state.active
    if active is None or active.generation is None:
        return None, {}
    try:
        async with asyncio.timeout(GLANCE_S):
            return await _read_plan(api, active.job, active.generation.plan)
    except (TimeoutError, StoreError):
        return None, {}  # The rest of the status does not wait for the store.


async def _read_plan(
    api: Api, job: JobId, sha: str
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A plan and what was said of it: from memory, else from the store, and raises what that does.

    A plan never changes, so that memory is as good.
    """
    known = api.shell.plans.get(sha)
    if known is not None:
        return render.read_plan(known.plan), known.about
    if sha not in api.plans_seen:
        text = await api.gateway.read_plan(job, sha)
        about = await api.gateway.read_about(job, sha)
        if text is None:
            return None, about
        api.plans_seen = {sha: (render.read_plan(text), about)}
    return api.plans_seen[sha]


async def _read_history(api: Api, job: JobId) -> tuple[tuple[Transition, ...], float | None]:
    """A job's transitions; while the store is away those that are remembered, and since when."""
    try:
        return await api.gateway.read_history(job), None
    except StoreError:
        remembered = (each for each in api.shell.feed.kept if each.job == job)
        lines = tuple(
            Transition(each.id, each.at, each.text, each.generation, each.step, each.term)
            for each in remembered
            if each.kind == "transition"
        )
        return lines, api.shell.store.unavailable_since or api.clock.now()


# ---- jobs ---------------------------------------------------------------------------------------


async def list_jobs(request: web.Request) -> web.Response:
    """All jobs."""
    return answer(render.jobs_view(request.app[API].shell.shown))


async def submit_job(request: web.Request) -> web.Response:
    """Put a job into the queue."""
    api = request.app[API]
    kinds = {"job": str, "id": str, "priority": int, "resume": str}
    body = await read_object(request, kinds, ("job",))
    job = await asyncio.to_thread(read_job, body["job"])
    id_ = JobId(body.get("id") or f"{job.name}-{uuid.uuid4().hex[:6]}")
    if not ID.match(id_):
        raise InputError(Problem("id", "is no name", NAMES))
    priority = body.get("priority", 0)
    if abs(priority) > PRIORITY_MAX:
        raise InputError(Problem("priority", f"is beyond {PRIORITY_MAX:,}", "give a smaller one"))
    layers, atoms = job_shape(job)
    now, saving = api.clock.now(), saving_of(job)
    durable = await asyncio.to_thread(begins_from, job, id_, saving.uri, body.get("resume"))
    bill = Bill(usd_max=job.objective.max_usd_total)
    record = JobRecord(
        id_, "queued", priority, now, job.steps, layers, atoms, "submitted", saving, bill
    )
    if not await api.gateway.submit(record, body["job"], durable):
        return refusal(409, Problem("id", f"there is a job {id_} already", "give another id"))
    api.woken.set()
    if api.shell.state.term is not None:
        # Who submits may ask for it at once.
        await _until(lambda: render.job_view(api.shell.shown, id_) is not None)
    warnings = await asyncio.to_thread(warnings_of, job)
    told = types.Submitted(**render.fields_of(record), warnings=warnings)
    return answer(told, status=201, headers={"Location": f"/v1/jobs/{id_}"})


async def _until(is_known: Callable[[], bool]) -> None:
    """Give the controller time to read what has just been stored."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWN_S):
            while not is_known():
                await asyncio.sleep(0.01)


def job_of(request: web.Request) -> types.JobView:
    """The job that the address names; answered with 404 where there is none."""
    id_, state = request.match_info["job"], request.app[API].shell.shown
    found = render.job_view(state, JobId(id_)) if ID.match(id_) else None
    if found is None:
        known = (job.id for job in render.jobs_view(state).jobs)
        raise NotThere(Problem(id_[:64], "there is no job of that name", nearest(id_[:64], known)))
    return found


async def show_job(request: web.Request) -> web.Response:
    """One job."""
    return answer(job_of(request))


async def show_plan(request: web.Request) -> web.Response:
    """The plan of the job's last generation."""
    api, job = request.app[API], job_of(request)
    if job.generation is None:
        cure = "sailorctl why says what it waits for"
        raise NotThere(Problem(job.id, "it has no plan yet", cure))
    sha = job.generation.plan
    plan, about = await _read_plan(api, job.id, sha)
    return answer(types.PlanView(sha, plan, about))


async def show_history(request: web.Request) -> web.Response:
    """The job's transitions, each with its reason."""
    job = job_of(request)
    return answer(types.History(job.id, *await _read_history(request.app[API], job.id)))


async def show_why(request: web.Request) -> web.Response:
    """Why the job is where it is."""
    api, job = request.app[API], job_of(request)
    about: dict[str, Any] = {}
    history, away = await _read_history(api, job.id)
    if job.generation is not None:
        with contextlib.suppress(StoreError):  # Then the plan's own reasons are left out.
            _, about = await _read_plan(api, job.id, job.generation.plan)
    return answer(render.why_view(api.shell.shown, job, about, history, away))


async def order_job(request: web.Request) -> web.Response:
    """Cancel, pause, resume or replan a job, or have a checkpoint made of it."""
    job, order = job_of(request), request.match_info["order"]
    return await _give(request, order, job.id)


# ---- nodes --------------------------------------------------------------------------------------


async def list_nodes(request: web.Request) -> web.Response:
    """All nodes."""
    return answer(render.nodes_view(request.app[API].shell.shown))


async def order_node(request: web.Request) -> web.Response:
    """Drain, cordon, uncordon or warn a node."""
    name, order = request.match_info["node"], request.match_info["order"]
    nodes_of(request)
    return await _give(request, order, name)


def nodes_of(request: web.Request) -> list[Node]:
    """The lives of the node that the address names; answered with 404 where there are none."""
    name, nodes = request.match_info["node"], request.app[API].shell.shown.nodes.values()
    found = [node for node in nodes if name in (node.record.id, node.record.name)]
    if not found:
        known = nearest(name[:64], (node.record.name for node in nodes))
        raise NotThere(Problem(name[:64], "there is no node of that name", known))
    return found


async def _give(request: web.Request, order: str, target: str) -> web.Response:
    api = request.app[API]
    kinds: dict[str, type] = {"id": str, "reason": str, "leaves_at": float}
    body = await read_object(request, kinds, ())
    intent = read_intent(order, target, body)
    return await give(api, intent)


async def give(api: Api, intent: Intent) -> web.Response:
    """Store an order; refuse one that would change nothing, and say what would."""
    useless = objection(api.shell.state, intent)
    if useless is not None:
        return refusal(409, useless)
    given = await api.gateway.give_intent(intent)
    if given == "other":
        return refusal(409, OTHER_ID)
    api.woken.set()
    if api.shell.state.term is not None:
        # Whoever orders one thing after the other is judged by all that went before.
        await _until(lambda: intent.id in api.shell.state.intents)
    return answer(types.Taken(intent.id, given == "new"), status=202)


def read_intent(order: str, target: str, body: dict[str, Any]) -> Intent:
    """An order from its parts; ``InputError`` where they cannot be one."""
    id_ = body.get("id") or uuid.uuid4().hex
    if not ID.match(id_):
        raise InputError(Problem("id", "is no name", NAMES))
    leaves_at = body.get("leaves_at")
    if leaves_at is not None and not 0 < leaves_at < LEAVES_MAX:
        raise InputError(Problem("leaves_at", "is no moment", "give seconds since 1970"))
    kind: IntentKind = order  # type: ignore[assignment] # the route's pattern lets no other through
    return Intent(id_, kind, target, leaves_at, body.get("reason", "")[:500])


# ---- what goes on -------------------------------------------------------------------------------


async def events(request: web.Request) -> web.StreamResponse:
    """Happenings as server-sent events; after the id that the client saw last."""
    api = request.app[API]
    given = request.headers.get("Last-Event-ID") or request.query.get("after") or "0"
    if not re.fullmatch(r"[0-9]{1,18}", given, re.ASCII):
        raise InputError(Problem("Last-Event-ID", "is no number", "send the last id you saw"))
    follow = request.query.get("follow", "true")
    if follow not in ("true", "false"):
        raise InputError(Problem("follow", "is neither true nor false", "give one of them"))
    if follow == "false":
        return answer(types.Events(tuple(api.shell.feed.after(int(given)))))
    reply = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    reply.content_type = "text/event-stream"
    await reply.prepare(request)
    with request.app[DOOR].aside():
        return await _stream(reply, api.shell.feed.follow(int(given)))


async def _stream(
    reply: web.StreamResponse, happenings: AsyncIterator[Happening]
) -> web.StreamResponse:
    pending = asyncio.ensure_future(anext(happenings))
    try:
        while True:
            done, _ = await asyncio.wait([pending], timeout=PING_S)
            if not done:
                await reply.write(b": still here\n\n")
                continue
            each = pending.result()
            text = json.dumps(plain(each))
            await reply.write(f"id: {each.id}\nevent: {each.kind}\ndata: {text}\n\n".encode())
            pending = asyncio.ensure_future(anext(happenings))
    except ConnectionError:
        return reply  # Whoever listened has gone, as everybody does in the end.
    finally:
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending


async def logs(request: web.Request) -> web.Response:
    """The end of what a node's workers wrote, or what came after a mark; from its agent."""
    api, name = request.app[API], request.match_info["node"]
    rank, mark = request.query.get("rank", ""), request.query.get("after", "")
    if not re.fullmatch(r"[0-9]{0,5}", rank, re.ASCII):
        raise InputError(Problem("rank", "is no rank", "give a number"))
    if not re.fullmatch(LOG_MARK, mark, re.ASCII):
        raise InputError(Problem("after", "is no mark", f"give what {MARK_HEADER} held"))
    for node in nodes_of(request):
        if node.record.address:
            path = (f"/v1/logs/{rank}" if rank else "/v1/logs") + (mark and f"?after={mark}")
            try:
                said = await api.shell.calls.call(node.record.address, "GET", path)
                written = decode(Output, said)
            except (CallFailed, WireError) as error:
                cure = "see that sailor-agent runs there and can be reached from here"
                what = f"its agent did not answer: {error}"
                return refusal(502, Problem(node.record.name, what, cure))
            if rank and int(rank) not in written.ranks:
                ranks = ", ".join(map(str, written.ranks))
                cure = f"there are ranks {ranks}" if ranks else "no worker has begun there yet"
                raise NotThere(Problem(node.record.name, f"rank {rank} wrote nothing there", cure))
            headers = {MARK_HEADER: written.mark}
            text = _told(written, is_named=not rank and len(written.ranks) > 1)
            return web.Response(text=text, content_type="text/plain", headers=headers)
    raise NotThere(Problem(name, "it gave no address", "see sailorctl nodes"))


def _told(written: Output, *, is_named: bool) -> str:
    """What was written, under the rank's name where there are several."""
    parts = ((f"==> rank {part.rank} <==\n" if is_named else "", part) for part in written.parts)
    return "".join(f"{name}{part.text}" for name, part in parts)


async def report(request: web.Request) -> web.StreamResponse:
    """An agent's report, signed with the cluster's key; the answer is signed too."""
    verifier = request.app[API].verifier
    return await answer_signed(
        request, verifier, _take_report, read_body=read_unsigned, refuse=_refuse_signature
    )


def _refuse_signature(error: SignatureError) -> web.Response:
    cure = "sign with the cluster's key, and check this machine's clock"
    return refusal(401, Problem(REQUEST_HEADER, str(error), cure))


async def _take_report(request: web.Request) -> web.StreamResponse:
    api = request.app[API]
    try:
        said = decode(Report, await request.read())
    except WireError as error:
        return refusal(422, Problem("body", str(error), "send a report of this version"))
    term = api.shell.state.term
    if term is not None:
        api.shell.hear(said)
    status, body = 200 if term is not None else 409, encode(api.shell.answer_to(said))
    return web.Response(body=body, status=status, content_type="application/json")


async def read_object(
    request: web.Request, kinds: dict[str, type], required: tuple[str, ...]
) -> dict[str, Any]:
    """Read a body of JSON with these keys and no others; an empty body is an empty object."""
    raw = await read_body(request)
    try:
        value = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        why = error if isinstance(error, json.JSONDecodeError) else "no text, or nested too deeply"
        raise InputError(Problem("body", f"is not valid JSON: {why}", "send { ... }")) from None
    if not isinstance(value, dict):
        raise InputError(Problem("body", "is no object", "send { ... }"))
    problems = [
        Problem(f"body: {key[:40]}", "is not known", f"known are {', '.join(kinds)}")
        for key in value
        if key not in kinds
    ]
    for key, kind in kinds.items():
        if key not in value:
            if key in required:
                problems.append(Problem(f"body: {key}", "is missing", f"give {KINDS[kind]}"))
            continue
        is_number = kind is float and type(value[key]) in (int, float)
        if type(value[key]) is not kind and not is_number:
            what = f"is {quote(value[key])}"
            problems.append(Problem(f"body: {key}", what, f"give {KINDS[kind]}"))
        elif kind is str and not _is_clean(value[key]):
            what = "holds a NUL, or half of a character"
            problems.append(Problem(f"body: {key}", what, "leave it out"))
    if problems:
        raise InputError(problems[:50])
    return value


def _is_clean(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
