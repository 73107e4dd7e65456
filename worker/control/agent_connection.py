"""A worker's connection to its agent: sends status reports and receives commands.

The agent may restart: the worker reconnects and reports its status again. If no agent comes back
within ``orphan_s`` seconds, the process exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

StatusFields = dict[str, Any]
AgentMessage = dict[str, Any]

_CONNECT_S = 0.1
"""Seconds between attempts to connect."""
_REPEAT_S = 0.5
"""Seconds after which the status is repeated."""
_PROGRESS_S = 0.02
"""The shortest time between two reports of mere progress."""
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class AgentConnection:
    """The connection and the thread that serves it."""

    path: str
    orphan_s: float
    on_message: Callable[[AgentMessage], None]
    """Called in the connection's thread."""
    _status: StatusFields = field(default_factory=dict)
    _to_deliver: deque[StatusFields] = field(default_factory=deque)
    """Reports that must be delivered."""
    _changed: bool = False
    _sent_at: float = 0.0
    _heard_at: float = field(default_factory=time.monotonic)
    _socket: socket.socket | None = None
    _waiting: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def open(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._serve, name="agent connection", daemon=True).start()

    def report(self, status: StatusFields, must_deliver: bool) -> None:
        """Report the status; unless ``must_deliver``, a later report may replace it."""
        with self._lock:
            self._status = status
            self._changed = True
            if must_deliver:
                self._to_deliver.append(status)
        if must_deliver:
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker, b"!")

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all reports that must be delivered are sent, for at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self._to_deliver and time.monotonic() < deadline:
            time.sleep(0.005)

    # ---- the thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._exchange()
        except BaseException:
            # Without this thread nobody could end the process, or knew what it does.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _exchange(self) -> None:
        while time.monotonic() < self._heard_at + self.orphan_s:
            try:
                if self._socket is None:
                    self._connect()
                self._send()
                self._receive()
            except OSError:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
                time.sleep(_CONNECT_S)
        print("no agent reconnected", flush=True)
        os._exit(0)

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_REPEAT_S * 2)
        self._socket.connect(self.path)
        self._waiting = b""
        self._sent_at = 0.0
        self._heard_at = time.monotonic()

    def _send(self) -> None:
        while self._to_deliver:
            self._write(self._to_deliver[0])
            with self._lock:
                self._to_deliver.popleft()
        silent_s = time.monotonic() - self._sent_at
        if self._status and silent_s > (_PROGRESS_S if self._changed else _REPEAT_S):
            with self._lock:
                status, self._changed = self._status, False
            self._write(status)

    def _write(self, status: StatusFields) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(status).encode() + b"\n")
        self._sent_at = time.monotonic()

    def _receive(self) -> None:
        assert self._socket is not None
        wait_s = _PROGRESS_S if self._changed else _REPEAT_S
        line, poll = self._socket.fileno(), select.poll()  # select() knows no number above 1023.
        for each in (line, self._woken):
            poll.register(each, select.POLLIN)
        ready = [each for each, _ in poll.poll(wait_s * 1000)]
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if line in ready:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the agent closed the connection")
            *lines, self._waiting = (self._waiting + data).split(b"\n")
            for message in lines:
                self.on_message(json.loads(message))
        self._heard_at = time.monotonic()
