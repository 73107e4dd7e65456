"""The loop looks after a few sockets at each turn, and after all of them in the end."""

from __future__ import annotations

import contextlib
import selectors
import socket

from sailord.controller.fair_event_loop import EVENTS_MAX, FewAtOnce


def test_nobody_is_forgotten():
    with contextlib.ExitStack() as stack, FewAtOnce() as selector:
        pairs = [socket.socketpair() for _ in range(2 * EVENTS_MAX + 1)]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs)
            selector.register(ours, selectors.EVENT_READ)
            theirs.send(b"x")
        turns = []
        while ready := selector.select(0):
            turns.append(len(ready))
            for key, _ in ready:
                assert key.fileobj.recv(1) == b"x"
        assert turns == [EVENTS_MAX, EVENTS_MAX, 1]
