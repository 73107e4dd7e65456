"""Streams of events are limited for each person, and are no requests in progress."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from sailord.api.access.load_limits import STREAMS_MAX, Load
from sailord.api.handlers.context import ApiContext


def test_one_person_cannot_take_all_streams():
    load = Load(in_progress=STREAMS_MAX)
    with ExitStack() as open_streams:
        for _ in range(STREAMS_MAX):
            assert load.may_stream("vera")
            open_streams.enter_context(load.streaming("vera"))
        assert not load.may_stream("vera")
        assert load.may_stream("otto")
        assert load.in_progress == 0
    assert load.may_stream("vera")
    assert (load.in_progress, load.streams) == (STREAMS_MAX, {})


def test_a_stream_ends_where_another_sailord_leads(monkeypatch):
    """Otherwise a stream that began while the store was away would stay open, without an event."""
    monkeypatch.setattr(ApiContext, "__post_init__", lambda _: None)
    about: dict[str, Any] = dict.fromkeys(("own_gateway", "clock", "key", "network", "goodput"))
    leader: Any = SimpleNamespace(address="one:1")
    state = SimpleNamespace(term=None)
    cluster: Any = SimpleNamespace(leader=leader, state=state)
    config: Any = SimpleNamespace(address="one:1")
    api = ApiContext(config=config, cluster=cluster, **about)
    assert api.may_stream_on(None)
    leader.address = "two:1"
    assert not api.may_stream_on(None)
    state.term = 3
    assert api.may_stream_on(3)
    assert not api.may_stream_on(None)
