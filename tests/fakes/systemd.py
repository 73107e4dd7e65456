"""The ear that systemd lends to a service: a real datagram socket, and all that was said to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class Ear:
    """What a service told systemd, a line at a time."""

    path: Path
    socket: socket.socket
    heard: list[str] = field(default_factory=list)

    def listen(self, within_s: float) -> bool:
        """Whether anything was said in that time."""
        self.socket.settimeout(max(within_s, 0.001))
        try:
            text = self.socket.recv(4096).decode()
        except TimeoutError:
            return False
        self.heard += text.split("\n")
        return True

    def wait_for(self, line: str, *, within_s: float = 20.0) -> None:
        """Return when a line that begins like this is said anew."""
        end, known = time.monotonic() + within_s, len(self.heard)
        while not any(said.startswith(line) for said in self.heard[known:]):
            assert time.monotonic() < end, f"{line} was not said; {self.heard[-5:]}"
            self.listen(end - time.monotonic())

    def wait_for_silence(self, *, for_s: float = 1.0, within_s: float = 20.0) -> None:
        """Return when nothing was said for so long."""
        end = time.monotonic() + within_s
        while self.listen(for_s):
            assert time.monotonic() < end, "it goes on and on"


@contextmanager
def ear(folder: Path) -> Iterator[Ear]:
    """Where a service may find it is to be told as ``NOTIFY_SOCKET``."""
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(path))
        yield Ear(path, end)
