"""The edge of the screen: the alternate screen of a terminal, its keys and its changes of size."""

from __future__ import annotations

import codecs
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

KEYS = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1b[F": "end", "\x1b[4~": "end"},
    **{"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"},
    **{"\x1b": "escape", "\x03": "interrupt"},
}
READ_BYTES = 1024


class HasFileno(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int:
        """Its descriptor."""


def is_usable() -> bool:
    """Return whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class Terminal:
    """A context manager: draws on the alternate screen, and reads keys one by one.

    Ctrl-C still sends SIGINT. On exit the terminal is restored.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._live = Live(console=self.console, screen=True, auto_refresh=False)
        self._saved: list[Any] | None = None
        self._winch: Any = None
        self._woken_before = -1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._resized, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def __enter__(self) -> Terminal:
        if sys.stdin.isatty():
            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._winch = signal.signal(signal.SIGWINCH, _ignore)
        # Python runs a handler only after a wait that begins just then; the descriptor ends it.
        self._woken_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        signal.set_wakeup_fd(self._woken_before)
        signal.signal(signal.SIGWINCH, self._winch)
        if self._saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)
        os.close(self._resized)
        os.close(self._wake)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        width, height = self.console.size
        return width, height

    @property
    def is_ascii(self) -> bool:
        """Whether only ASCII can be shown."""
        return self.console.options.ascii_only

    def draw(self, renderable: RenderableType) -> None:
        """Replace what the screen shows."""
        self._live.update(renderable, refresh=True)

    def wait(self, seconds: float, others: Sequence[HasFileno] = ()) -> list[str]:
        """Wait for keys, a change of size, or one of the others; return the keys."""
        keyboard = [sys.stdin.fileno()] if self._saved is not None else []
        ready, _, _ = select.select([*keyboard, self._resized, *others], [], [], max(seconds, 0.0))
        if self._resized in ready:
            os.read(self._resized, READ_BYTES)
        if not keyboard or keyboard[0] not in ready:
            return []
        return keys_of(self._decoder.decode(os.read(keyboard[0], READ_BYTES)))


def _ignore(_: int, __: FrameType | None) -> None:
    """A signal without a handler of Python's would not wake."""


def keys_of(text: str) -> list[str]:
    """Return the keys that a terminal sent: names of ``KEYS``, or the letters themselves."""
    found = []
    while text:
        code = next((code for code in KEYS if len(code) > 1 and text.startswith(code)), text[0])
        text = text[len(code) :]
        if code in KEYS:
            found.append(KEYS[code])
        elif code.isprintable():
            found.append(code)
    return found
