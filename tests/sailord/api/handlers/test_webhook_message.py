"""Webhooks that come where none are configured."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sailord.api.answers.responses import Refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.webhook_message import NO_WEBHOOKS, read_message
from sailord.config import Webhooks
from sailord.notify.webhook_signature import SIGNATURE_HEADER


@pytest.mark.parametrize("header", ["Authorization", SIGNATURE_HEADER])
def test_sender_is_told_that_no_webhooks_are_configured(header: str) -> None:
    config = SimpleNamespace(webhooks=Webhooks())
    api = SimpleNamespace(config=config, pubsub_keys=None)
    request: Any = SimpleNamespace(app={CONTEXT: api}, headers={header: "Bearer x"})
    with pytest.raises(Refusal) as refused:
        asyncio.run(read_message(request))
    assert NO_WEBHOOKS in str(refused.value)
