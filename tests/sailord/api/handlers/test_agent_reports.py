"""sailord takes a report only from the node that it is about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agents.protocol.codec import encode
from agents.protocol.records import Fence, NodeId, Report, ReportReply
from sailord.api.handlers.agent_reports import _take_report
from sailord.api.handlers.context import CONTEXT


@pytest.mark.parametrize(
    ("certificate", "status"),
    [
        ("sailor://test/agent/n2", 200),
        ("sailor://test/agent/n1", 403),
        ("sailor://test/agent/n", 403),
        (None, 200),
    ],
)
async def test_a_node_reports_for_itself_alone(certificate, status):
    taken = []
    shown = certificate and {"subjectAltName": (("URI", certificate),)}
    unreadable = SimpleNamespace(clear=lambda _: None)
    api = SimpleNamespace(
        own_gateway=SimpleNamespace(unreadable=unreadable),
        cluster=SimpleNamespace(
            state=SimpleNamespace(term=1),
            put_report=taken.append,
            answer_to=lambda _: ReportReply(1),
        ),
    )

    async def read() -> bytes:
        return encode(Report(node=NodeId("n2.1a2b.7"), number=1, heard=Fence(0, 0)))

    request = SimpleNamespace(
        app={CONTEXT: api},
        read=read,
        remote="10.0.0.1",
        transport=SimpleNamespace(get_extra_info={"peercert": shown}.get),
    )
    answer = await _take_report(request)
    assert (answer.status, len(taken)) == (status, status == 200)
