"""A fake of systemd's notify socket that records every message."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class NotifySocket:
    """The messages of a service to systemd, line by line.

    A thread reads them all the time, because the kernel buffers only a few.
    """

    path: Path
    lines: list[str] = field(default_factory=list)
    _after: int = 0
    """Index after the line that was waited for last."""

    def listen(self, end: socket.socket) -> None:
        """Record all messages until the socket is closed."""
        while text := end.recv(4096).decode():
            self.lines += text.split("\n")

    def wait_for(self, line: str, *, within_s: float = 60.0) -> None:
        """Return when a line with this prefix arrived after the last one waited for."""
        end = time.monotonic() + within_s
        while True:
            for number in range(self._after, len(self.lines)):
                if self.lines[number].startswith(line):
                    self._after = number + 1
                    return
            assert time.monotonic() < end, f"{line} did not arrive; {self.lines[-5:]}"
            time.sleep(0.01)

    def wait_for_silence(self, *, for_s: float = 1.0, within_s: float = 60.0) -> None:
        """Return after this time without a message."""
        end, known = time.monotonic() + within_s, -1
        while known != len(self.lines):
            assert time.monotonic() < end, "messages did not stop"
            known = len(self.lines)
            time.sleep(for_s)
        self._after = known


@contextmanager
def notify_socket(folder: Path) -> Iterator[NotifySocket]:
    """Return the address to pass to the service as ``NOTIFY_SOCKET``."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(path))
        found = NotifySocket(path)
        listener = threading.Thread(target=found.listen, args=(end,))
        listener.start()
        try:
            yield found
        finally:
            end.shutdown(socket.SHUT_RD)
            listener.join()
