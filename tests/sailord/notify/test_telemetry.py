"""A reconfiguration as an OpenTelemetry trace, and the way to its receiver."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sailord.config import WebhookReceiver
from sailord.core.model.events import Reported
from sailord.core.model.phases import Running
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming
from sailord.notify import telemetry
from sailord.notify.telemetry import TraceSender, trace_of
from sailord.notify.webhook_sender import _ReceiverTask
from tests.sailord.core.states import BEGAN, JOB, NOW, A, B, act, report, state

MOVE = ReconfigurationTiming(
    generation=3,
    at=NOW - 10.0,
    kind="loss",
    reason="c is lost",
    is_planned=False,
    source="memory",
    restored_step=40,
    steps_lost=0,
    downtime_s=1.5,
    total_s=2.0,
    predicted_s=1.75,
    phases=(
        *(("detect", 0.25), ("plan", 0.5), ("quiesce", 0.25)),
        *(("fetch", 0.5), ("rebuild", 0.25), ("verify", 0.0), ("first_step", 0.25)),
    ),
    predicted=(("fetch", 0.5),),
)


def ran() -> Any:
    """A running job whose members have reported their phases."""
    after = state(Running(BEGAN))
    for node, fetch_s in ((A, 0.5), (B, 0.25)):
        phases = (("fetch", fetch_s), ("rebuild", 0.25), ("verify", 0.0), ("first_step", 0.25))
        after = act(after, Reported(NOW, report(node, number=9, step=41, phases=phases)))[0]
    return after


def spans_of(body: telemetry.Json) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    for resource in body["resourceSpans"]:
        about = {
            each["key"]: each["value"]["stringValue"] for each in resource["resource"]["attributes"]
        }
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield about, span


def seconds(span: dict[str, Any]) -> float:
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9


def test_the_phases_follow_each_other_and_fill_the_reconfiguration() -> None:
    found = list(spans_of(trace_of(MOVE, JOB, "test", ran())))
    own = [span for about, span in found if about["service.name"] == "sailord"]
    whole, *parts = own
    assert [span["name"] for span in own] == [
        *("reconfiguration", "detect", "plan", "quiesce", "move"),
    ]
    assert seconds(whole) == pytest.approx(2.0, abs=1e-6)
    assert [seconds(span) for span in parts] == pytest.approx([0.25, 0.5, 0.25, 1.0], abs=1e-6)
    edges = [whole["startTimeUnixNano"], *(span["endTimeUnixNano"] for span in parts)]
    assert [span["startTimeUnixNano"] for span in parts] == edges[:-1]
    assert edges[-1] == whole["endTimeUnixNano"]
    assert {span["parentSpanId"] for span in parts} == {whole["spanId"]}
    assert "parentSpanId" not in whole


def test_each_nodes_own_phases_stand_below_the_move() -> None:
    found = list(spans_of(trace_of(MOVE, JOB, "test", ran())))
    (move,) = [span for _, span in found if span["name"] == "move"]
    of_nodes: dict[str, list[tuple[str, float]]] = {}
    for about, span in found:
        if about["service.name"] == "sailor-worker":
            assert span["parentSpanId"] == move["spanId"]
            node = of_nodes.setdefault(about["host.name"], [])
            node.append((span["name"], round(seconds(span), 6)))
    same = [("rebuild", 0.25), ("verify", 0.0), ("first_step", 0.25)]
    assert of_nodes == {
        "machine-a": [("fetch", 0.5), *same],
        "machine-b": [("fetch", 0.25), *same],
    }
    assert len({span["traceId"] for _, span in found}) == 1
    assert len({span["spanId"] for _, span in found}) == len(found)
    assert trace_of(MOVE, JOB, "test", ran()) == trace_of(MOVE, JOB, "test", ran()), "no new ids"


def test_the_body_is_what_the_protocol_says() -> None:
    """OTLP's schema; its JSON form has ids in hexadecimal where protobuf's has base64."""
    schema = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    body = trace_of(MOVE, JOB, "test", ran())
    for _, span in spans_of(body):
        for key, size in (("traceId", 16), ("spanId", 8), ("parentSpanId", 8)):
            if key in span:
                raw = bytes.fromhex(span[key])
                assert len(raw) == size
                span[key] = base64.b64encode(raw).decode()
    message = json_format.ParseDict(body, schema.ExportTraceServiceRequest())
    root = message.resource_spans[0].scope_spans[0].spans[0]
    facts = {each.key: each.value for each in root.attributes}
    assert facts["sailor.reason"].string_value == "c is lost"
    assert facts["sailor.restored.step"].int_value == 40
    assert facts["sailor.planned"].WhichOneof("value") == "bool_value"
    assert facts["sailor.downtime_s"].double_value == 1.5
    assert facts["sailor.predicted.fetch_s"].double_value == 0.5


class Collector:
    """A receiver that gives these answers in their order, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.bodies = list(statuses), list[tuple[str, str, bytes]]()
        self.got = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append((request.path, request.content_type, await request.read()))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.got.set()
        return web.Response(status=status)


@contextlib.asynccontextmanager
async def served(collector: Collector):
    app = web.Application()
    app.router.add_post("/{rest:.*}", collector.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sender = TraceSender(f"http://127.0.0.1:{runner.addresses[0][1]}/", "test")
    sending = asyncio.create_task(sender.run())
    yield sender
    sending.cancel()
    await runner.cleanup()


async def test_a_busy_receiver_gets_the_trace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BACKOFF_S", 0.01)
    collector = Collector(503, 429)
    async with served(collector) as sender:
        sender.offer(MOVE, JOB, ran())
        await collector.got.wait()
    expected = json.loads(json.dumps(trace_of(MOVE, JOB, "test", ran())))
    assert [body[:2] for body in collector.bodies] == [("/v1/traces", "application/json")] * 3
    assert all(json.loads(body) == expected for *_, body in collector.bodies)


async def test_a_refused_trace_is_dropped_and_the_next_one_sent() -> None:
    collector = Collector(400)
    async with served(collector) as sender:
        sender.offer(MOVE, JOB, ran())
        sender.offer(MOVE, JOB, ran())
        await collector.got.wait()
    assert len(collector.bodies) == 2


async def test_waiting_traces_are_bounded_and_none_wait_without_a_receiver() -> None:
    silent, dead = TraceSender(None, "test"), TraceSender("http://127.0.0.1:9", "test")
    for _ in range(telemetry.WAITING_MAX + 5):
        silent.offer(MOVE, JOB, ran())
        dead.offer(MOVE, JOB, ran())
    assert silent._waiting.qsize() == 0
    assert dead._waiting.qsize() == telemetry.WAITING_MAX


async def test_an_address_that_no_client_takes_ends_no_trace_sender() -> None:
    async with aiohttp.ClientSession() as session:
        why = await TraceSender("http://a..b", "test")._send(session, b"{}")
        receiver = WebhookReceiver("http://a..b/x", b"secret", "sailor", ())
        task = _ReceiverTask(None, receiver, session)  # type: ignore[arg-type]  # unused here
        assert "address is not valid" in why
        assert await task._post(b"{}") == ("its address is not valid", False)
