"""The event loop serves few sockets per turn, and all of them in the end."""

from __future__ import annotations

import contextlib
import selectors
import socket

from sailord.controller.fair_event_loop import EVENTS_MAX, FairSelector


def test_every_ready_socket_is_served_within_a_few_turns():
    with contextlib.ExitStack() as stack, FairSelector() as selector:
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
