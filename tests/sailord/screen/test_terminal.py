"""The screen in a pseudo terminal: a change of size is drawn at once, and keys do what they say."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.sailord.cli.cluster.test_orders import Head, Reply, head, said

ROOT = Path(__file__).resolve().parents[3]
STORM = json.loads((Path(__file__).parent / "storm.json").read_text(encoding="utf-8"))
WITHIN_S = 60.0
WATCH = """
import sys
from sailord.screen import watch
from sailord.cli.main import main
watch.LOOK_S = 3600.0  # Nothing but a key or a change of size redraws.
main(["status", "-w", "--server", sys.argv[1]])
"""
UP = """
import sys
from pathlib import Path
from sailord.client import Client
from sailord.local.cluster import LocalCluster
from sailord.local.control import listen
from sailord.local.paths import LocalFolders
from sailord.local.screen import live
class Cluster(LocalCluster):
    client = Client(sys.argv[1])
    def kill_node(self, name):
        self.gone.append(name)
place = LocalFolders(Path(sys.argv[2]))
cluster = Cluster(place, nodes=dict.fromkeys(["b2", "c2", "c3"]))
cluster.look_after = lambda: ()
cluster.play_cloud = lambda status: ()
live(cluster, listen(cluster))
print("killed:", *cluster.gone)
"""


@dataclass
class Emulated:
    """A terminal of a size, and the program that draws on it."""

    program: subprocess.Popen[bytes]
    ours: int
    width: int
    height: int
    screen: pyte.Screen = field(init=False)
    said: bytes = b""

    def __post_init__(self) -> None:
        self.screen = pyte.Screen(self.width, self.height)
        self._stream = pyte.ByteStream(self.screen)

    def resize(self, width: int, height: int) -> None:
        """As the terminal does: set the size, then send the signal."""
        self.screen.resize(height, width)
        self.screen.reset()
        set_size(self.ours, width, height)
        self.program.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def wait(self, what: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines of the first screen of which this is true."""
        end = time.monotonic() + WITHIN_S
        while not what(lines := [line.rstrip() for line in self.screen.display]):
            assert select.select([self.ours], [], [], end - time.monotonic())[0], lines
            self.said += (new := os.read(self.ours, 65_536))
            self._stream.feed(new)
        return lines

    def end(self) -> str:
        """Quit, and return what the program printed in all."""
        self.press("q")
        with contextlib.suppress(OSError):  # The other end is closed.
            while new := os.read(self.ours, 65_536):
                self.said += new
        assert self.program.wait(WITHIN_S) == 0
        return self.said.decode()


def set_size(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def reply(method: str, path: str, _: Any) -> Reply:
    """A sailord in which nothing happens any more."""
    if method == "POST":
        return said({"id": "x"}, 202)
    if path.startswith("/v1/events"):
        return said({"events": STORM["events"] if path.endswith("after=0") else []})
    names = {"/v1/status": STORM["status"], "/v1/nodes": {"nodes": STORM["nodes"]}}
    return said(names.get(path, {"moves": []}))


@pytest.fixture
def server() -> Iterator[Head]:
    with head(reply) as made:
        yield made


@contextlib.contextmanager
def drawn(
    code: str, server: Head, *words: str, width: int = 80, height: int = 24
) -> Iterator[Emulated]:
    ours, theirs = pty.openpty()
    set_size(ours, width, height)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    program = subprocess.Popen(
        [sys.executable, "-c", code, f"http://127.0.0.1:{server.server_port}", *words],
        env=environment | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}, cwd=ROOT,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Emulated(program, ours, width, height)
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_a_change_of_size_is_drawn_at_once_without_a_new_answer(server: Head) -> None:
    with drawn(WATCH, server) as terminal:
        first = terminal.wait(lambda lines: "quit" in lines[23])
        assert first[0].startswith("tale  running")
        asked = len(server.asked)
        for width, height in ((120, 40), (60, 20)):
            terminal.resize(width, height)
            lines = terminal.wait(lambda lines, last=height - 1: "quit" in lines[last])
            assert len(lines[0]) == width, "the clock stands at the right edge"
        assert len(server.asked) == asked
        assert "tale: " in terminal.end(), "a summary is left on the screen"


def test_key_k_kills_a_node_of_this_launcher_and_prints_its_name(
    server: Head, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    with drawn(UP, server, str(tmp_path)) as terminal:
        terminal.wait(lambda lines: "kill" in lines[23])
        terminal.press("k")
        prompt = terminal.wait(lambda lines: lines[23].startswith("kill which node?"))
        assert "b2 c1 c2" in prompt[23]
        terminal.press("b\r")
        terminal.wait(lambda lines: any("b2 is killed, and its memory" in line for line in lines))
        terminal.wait(lambda lines: " preempt" in lines[23])
        assert "killed: b2" in terminal.end()
    assert server.orders == [], "sailord is not asked"
