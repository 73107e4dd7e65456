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
class Ear:
    """What a service told systemd, a line at a time.

    It always listens, as systemd does: the kernel keeps but a few messages that nobody took.
    """

    path: Path
    heard: list[str] = field(default_factory=list)
    _after: int = 0
    """What was waited for last was said before this line."""

    def listen(self, end: socket.socket) -> None:
        """Hear all until the socket is shut."""
        while text := end.recv(4096).decode():
            self.heard += text.split("\n")

    def wait_for(self, line: str, *, within_s: float = 60.0) -> None:
        """Return when a line that begins like this was said after the last that was waited for."""
        end = time.monotonic() + within_s
        while True:
            for number in range(self._after, len(self.heard)):
                if self.heard[number].startswith(line):
                    self._after = number + 1
                    return
            assert time.monotonic() < end, f"{line} was not said; {self.heard[-5:]}"
            time.sleep(0.01)

    def wait_for_silence(self, *, for_s: float = 1.0, within_s: float = 60.0) -> None:
        """Return when nothing was said for so long."""
        end, said = time.monotonic() + within_s, -1
        while said != len(self.heard):
            assert time.monotonic() < end, "it goes on and on"
            said = len(self.heard)
            time.sleep(for_s)
        self._after = said


@contextmanager
def ear(folder: Path) -> Iterator[Ear]:
    """Where a service may find it is to be told as ``NOTIFY_SOCKET``."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(path))
        found = Ear(path)
        listener = threading.Thread(target=found.listen, args=(end,))
        listener.start()
        try:
            yield found
        finally:
            end.shutdown(socket.SHUT_RD)
            listener.join()
