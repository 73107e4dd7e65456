"""A worker's line to its agent: words go out, orders come in, whatever training does meanwhile.

The agent may end and come back: the worker calls again and says where it stands. When none has
come for long, the process ends, since nobody would ever ask for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Status = dict[str, Any]
AgentMessage = dict[str, Any]

_CALL_S = 0.1
"""From one call to the next while nobody answers."""
_QUIET_S = 0.5
"""A word is said again after so long."""
_STEPS_S = 0.02
"""What only counts on is not said more often."""
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class AgentConnection:
    """The connection, and the thread that serves it."""

    path: str
    orphan_s: float
    obey: Callable[[AgentMessage], None]
    """Called in the line's thread."""
    _now: Status = field(default_factory=dict)
    _unsaid: deque[Status] = field(default_factory=deque)
    """What must not be left out."""
    _is_new: bool = False
    _said_at: float = 0.0
    _heard_at: float = field(default_factory=time.monotonic)
    _socket: socket.socket | None = None
    _waiting: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def open(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._serve, name="line to the agent", daemon=True).start()

    def say(self, word: Status, at_once: bool) -> None:
        """This is how the worker stands; without ``at_once`` a later word may take its place."""
        with self._lock:
            self._now = word
            self._is_new = True
            if at_once:
                self._unsaid.append(word)
        if at_once:
            self._wake()

    def flush(self, timeout_s: float = 1.0) -> None:
        """Return when all that must be said is said, or nobody takes it."""
        deadline = time.monotonic() + timeout_s
        while self._unsaid and time.monotonic() < deadline:
            time.sleep(0.005)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"!")

    # ---- the thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        while time.monotonic() < self._heard_at + self.orphan_s:
            try:
                if self._socket is None:
                    self._call()
                self._speak()
                self._listen()
            except OSError:
                self._hang_up()
                time.sleep(_CALL_S)
        print("no agent came back", flush=True)
        os._exit(0)

    def _call(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_QUIET_S * 2)
        self._socket.connect(self.path)
        self._waiting = b""
        self._said_at = 0.0
        self._heard_at = time.monotonic()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _speak(self) -> None:
        while self._unsaid:
            self._write(self._unsaid[0])
            with self._lock:
                self._unsaid.popleft()
        quiet_s = time.monotonic() - self._said_at
        if self._now and quiet_s > (_STEPS_S if self._is_new else _QUIET_S):
            with self._lock:
                word, self._is_new = self._now, False
            self._write(word)

    def _write(self, word: Status) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(word).encode() + b"\n")
        self._said_at = time.monotonic()

    def _listen(self) -> None:
        assert self._socket is not None
        wait_s = _STEPS_S if self._is_new else _QUIET_S
        line = self._socket.fileno()
        ready, _, _ = select.select([line, self._woken], [], [], wait_s)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if line in ready:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the agent is gone")
            *lines, self._waiting = (self._waiting + data).split(b"\n")
            for order in lines:
                self.obey(json.loads(order))
        self._heard_at = time.monotonic()
