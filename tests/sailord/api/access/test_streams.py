"""Streams of events are limited for each person, and are no requests in progress."""

from __future__ import annotations

from contextlib import ExitStack

from sailord.api.access.load_limits import STREAMS_MAX, Load


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
