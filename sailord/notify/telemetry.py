"""Sends each reconfiguration as an OpenTelemetry trace: OTLP over HTTP, in its JSON form.

A trace is made when the reconfiguration has ended, from what its timing and the nodes' reports
measured: one span for all of it, one for each phase, and below *move* those of each node's workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import structlog

from agents.daemon.backoff import Backoff
from agents.protocol.records import JobId
from sailord.core.model.state import State
from sailord.core.queries.reconfiguration_timing import MEASURED, ReconfigurationTiming

log = structlog.get_logger("sailord.notify.telemetry")

WAITING_MAX = 100
"""Traces that wait for the receiver; beyond this the oldest are dropped."""
ATTEMPTS_MAX = 8
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
TIMEOUT_S = 10.0
RETRYABLE = {429, 502, 503, 504}
"""As OTLP says; any other refusal is final."""
MOVE = "move"
"""The span of what the nodes do."""
Json = dict[str, Any]


def trace_of(move: ReconfigurationTiming, job: JobId, cluster: str, state: State) -> Json:
    """Return a reconfiguration as the body of an OTLP request."""
    about = f"{cluster}/{job}/{move.generation}/{move.at}"
    trace, root, moving = _id(about, 16), _id(about, 8), _id(f"{about}/{MOVE}", 8)
    own = [_Span("reconfiguration", root, "", move.at, move.total_s, _facts(move, job))]
    at = move.at
    for name, seconds in move.phases:
        if name not in MEASURED:
            own.append(_Span(name, _id(f"{about}/{name}", 8), root, at, seconds))
            at += seconds
    own.append(_Span(MOVE, moving, root, at, max(move.at + move.total_s - at, 0.0)))
    resources = [_resource("sailord", cluster, trace, own)]
    for node, phases in sorted(_phases_of_nodes(state)):
        spans, begun = [], at
        for name, seconds in phases:
            spans.append(_Span(name, _id(f"{about}/{node}/{name}", 8), moving, begun, seconds))
            begun += seconds
        resources.append(_resource("sailor-worker", cluster, trace, spans, node))
    return {"resourceSpans": resources}


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    id: str
    parent: str
    at: float
    seconds: float
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def _facts(move: ReconfigurationTiming, job: JobId) -> Mapping[str, str | int | float | bool]:
    return {
        "sailor.job": job,
        "sailor.generation": move.generation,
        "sailor.kind": move.kind,
        "sailor.reason": move.reason,
        "sailor.planned": move.is_planned,
        "sailor.restored.source": move.source,
        "sailor.restored.step": move.restored_step,
        "sailor.steps_lost": move.steps_lost,
        "sailor.downtime_s": move.downtime_s,
        "sailor.predicted_s": move.predicted_s,
        **{f"sailor.predicted.{name}_s": seconds for name, seconds in move.predicted},
    }


def _phases_of_nodes(state: State) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield each member's name and what its slowest worker measured, in order."""
    active = state.active
    if active is None or active.generation is None:
        return
    for id_, report in state.reports_of(active.generation):
        measured = dict(report.phases)
        phases = [(name, measured[name]) for name in MEASURED if name in measured]
        if phases:
            yield state.nodes[id_].record.name, phases


def _id(text: str, size: int) -> str:
    """Return the same id for the same reconfiguration, so that a repetition adds nothing."""
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * size]


def _resource(service: str, cluster: str, trace: str, spans: list[_Span], host: str = "") -> Json:
    facts: dict[str, str | int | float | bool] = {"service.name": service}
    facts |= {"service.namespace": cluster, **({"host.name": host} if host else {})}
    return {
        "resource": {"attributes": _attributes(facts)},
        "scopeSpans": [
            {"scope": {"name": "sailor"}, "spans": [_encode_span(trace, s) for s in spans]}
        ],
    }


def _encode_span(trace: str, span: _Span) -> Json:
    return {
        "traceId": trace,
        "spanId": span.id,
        **({"parentSpanId": span.parent} if span.parent else {}),
        "name": span.name,
        "kind": 1,  # Internal.
        "startTimeUnixNano": str(round(span.at * 1e9)),
        "endTimeUnixNano": str(round((span.at + span.seconds) * 1e9)),
        "attributes": _attributes(span.facts),
    }


def _attributes(facts: Mapping[str, str | int | float | bool]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items()]


def _value(value: str | int | float | bool) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}


@dataclass(eq=False)
class TraceSender:
    """Sends traces one after the other; what cannot be sent is dropped, and the log says so."""

    endpoint: str | None
    """Base address of a collector; ``None``: no traces are made."""
    cluster: str
    _waiting: asyncio.Queue[Json] = field(default_factory=lambda: asyncio.Queue(WAITING_MAX))

    def offer(self, move: ReconfigurationTiming, job: JobId, state: State) -> None:
        """Send a reconfiguration that has just ended, soon."""
        if self.endpoint is None:
            return
        if self._waiting.full():
            self._waiting.get_nowait()
            log.warning("a trace was dropped: the receiver is too slow", endpoint=self.endpoint)
        self._waiting.put_nowait(trace_of(move, job, self.cluster, state))

    async def run(self) -> None:
        """Send what is offered, forever."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                body = json.dumps(await self._waiting.get()).encode()
                why = await self._send(session, body)
                if why:
                    log.warning("a trace was dropped", endpoint=self.endpoint, why=why)

    async def _send(self, session: aiohttp.ClientSession, body: bytes) -> str:
        """Send until accepted or refused; return why it was not accepted."""
        url, why = f"{(self.endpoint or '').rstrip('/')}/v1/traces", ""
        backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(backoff.next_s())
            try:
                headers = {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=headers) as answer:
                    if answer.status < 300:
                        return ""
                    why = f"the receiver answered {answer.status}"
                    if answer.status not in RETRYABLE:
                        return why
            except ValueError as error:
                return f"its address is not valid: {error}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
        return why
