"""Speaks to a sailord for the command line: over its Unix socket, or over TCP with a token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from agents.daemon.backoff import Backoff
from sailord.local.paths import Place, default_folder
from simulator.documents.problems import InputError, Problem

T = TypeVar("T")
DEFAULT = "unix:///run/sailor/sailord.sock"
TIMEOUT_S = 20.0
FOLLOW_S = 60.0
"""Without even a sign of life for so long, a stream is broken."""
PAUSE_S_FIRST = 0.25
PAUSE_S_MAX = 5.0
"""Between two attempts to reach who was there before."""


class ServerProblem(Exception):  # noqa: N818 - what the server said, for a person to read
    """sailord could not be reached, or did not do what was asked."""

    def __init__(self, said: str | Sequence[Problem], status: int | None = None) -> None:
        text = said if isinstance(said, str) else "\n".join(map(str, said))
        super().__init__(text)
        self.problems = () if isinstance(said, str) else tuple(said)
        self.status = status
        """Of the answer; ``None``: there was none."""

    @property
    def passes(self) -> bool:
        """The same may be answered later: nobody is there, nobody leads yet, or too many ask."""
        return self.status is None or self.status in {408, 429, 502, 503}

    def about(self, sent: str, file: str) -> ServerProblem:
        """The same, in which what was sent as ``sent`` is called by its file's name."""
        if not self.problems:
            return self
        called = [replace(each, place=_called(each.place, sent, file)) for each in self.problems]
        return ServerProblem(called, self.status)


def _called(place: str, sent: str, file: str) -> str:
    is_meant = place == sent or place.startswith(f"{sent}:")
    return file + place.removeprefix(sent) if is_meant else place


class _Local(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(eq=False)
class Patience:
    """For who follows: sailord may be started anew meanwhile, and is asked again, ever more rarely.

    One that has never answered is not waited for: its address may be wrong.
    """

    tell: Callable[[ServerProblem], None]
    """Called when an outage begins, not at each attempt."""
    _backoff: Backoff = field(default_factory=lambda: Backoff(PAUSE_S_FIRST, PAUSE_S_MAX))
    _has_answered: bool = False
    _is_away: bool = False

    def answered(self) -> None:
        """It is there, so that the next outage begins anew."""
        self._backoff.reset()
        self._has_answered, self._is_away = True, False

    def wait(self, problem: ServerProblem) -> None:
        """Return when it is time to ask again; raises the problem if it does not pass."""
        if not problem.passes or (problem.status is None and not self._has_answered):
            raise problem
        self._has_answered |= problem.status is not None
        if not self._is_away:
            self._is_away = True
            self.tell(problem)
        time.sleep(self._backoff.next_s())

    def insist(self, ask: Callable[[], T]) -> T:
        """The first answer."""
        while True:
            try:
                found = ask()
            except ServerProblem as problem:
                self.wait(problem)
            else:
                self.answered()
                return found


@dataclass(frozen=True, slots=True)
class Client:
    """One sailord, by its address."""

    server: str
    token: str | None = None

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The answer's value, or its text where it is no JSON."""
        return self._exchange(method, path, body)[0]

    def log(self, node: str, rank: int | None, mark: str) -> tuple[str, str]:
        """What a node's workers wrote since the mark, or the end of it; and the next mark."""
        asked = {"after": mark} | ({} if rank is None else {"rank": rank})
        text, headers = self._exchange("GET", f"/v1/nodes/{part(node)}/logs?{urlencode(asked)}")
        return str(text), headers.get("Sailor-Log-Mark", "")

    def _exchange(
        self, method: str, path: str, body: object = None
    ) -> tuple[Any, http.client.HTTPMessage]:
        connection = self._connect(TIMEOUT_S)
        try:
            reply = self._send(connection, method, path, body)
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()
        value = _value(reply.headers, text)
        if reply.status >= 400:
            raise _refused(reply.status, value)
        return value, reply.headers

    def follow(self, after: int, patience: Patience) -> Iterator[dict[str, Any]]:
        """Happenings as they come, resumed by id where the connection breaks."""
        while True:
            try:
                for happening in self._stream(after, patience):
                    patience.answered()
                    after = happening["id"]
                    yield happening
            except ServerProblem as problem:
                patience.wait(problem)

    def _stream(self, after: int, patience: Patience) -> Iterator[dict[str, Any]]:
        connection = self._connect(FOLLOW_S)
        try:
            reply = self._send(connection, "GET", f"/v1/events?after={after}", None)
            if reply.status >= 400:
                raise _refused(reply.status, _value(reply.headers, reply.read()))
            patience.answered()  # It may have nothing to tell for a long time.
            for line in reply:
                # Where the connection breaks, so may a line.
                if line.startswith(b"data: ") and line.endswith(b"\n"):
                    yield json.loads(line.removeprefix(b"data: "))
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()
        raise ServerProblem(f"{self.server} has ended the stream")

    def _no_answer(self, error: OSError | http.client.HTTPException) -> ServerProblem:
        return ServerProblem(f"{self.server} did not answer: {_why(error)}{_cure(error)}")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.server)
        if parts.scheme == "unix" and parts.path:
            return _Local(parts.path, timeout_s)
        if parts.scheme in ("http", "https") and parts.hostname:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else None
            return (kind or http.client.HTTPConnection)(
                parts.hostname, parts.port, timeout=timeout_s
            )
        cure = "write unix:///run/sailor/sailord.sock or http://HOST:PORT"
        raise InputError(Problem("--server", f'"{self.server}" is no address', cure))

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        raw = None if body is None else json.dumps(body).encode()
        connection.request(method, path, raw, headers)
        return connection.getresponse()


def client_from(server: str | None, token_file: Path | None) -> Client:
    """The client for what was said on the command line or in the environment."""
    token = None
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeError) as error:
            what = f"cannot be read: {_why(error)}"
            raise InputError(Problem(str(token_file), what, "name a file with the token")) from None
    return Client(server or os.environ.get("SAILOR_SERVER") or _usual(), token)


def _usual() -> str:
    """The machine's own sailord; where there is none, that of the person's local cluster."""
    local = Place(default_folder(), port=0).socket
    if Path(DEFAULT.removeprefix("unix://")).exists():
        return DEFAULT
    with contextlib.suppress(OSError):
        # Anybody may make a folder of that name; only our own is believed.
        if local.stat().st_uid == os.getuid():
            return f"unix://{local}"
    return DEFAULT


def part(name: str) -> str:
    """A name as part of a path: nothing in it can mean another path."""
    return quote(name, safe="")


def _value(headers: http.client.HTTPMessage, text: bytes) -> Any:
    if "json" in (headers.get("Content-Type") or ""):
        with contextlib.suppress(ValueError):  # What stands between may say what it likes.
            return json.loads(text)
    return text.decode("utf-8", "replace")


def _refused(status: int, value: Any) -> ServerProblem:
    if not isinstance(value, dict) or "problems" not in value:
        return ServerProblem(f"it answered {status}", status)
    problems = [Problem(p["place"], p["what"], p["cure"]) for p in value["problems"]]
    return ServerProblem(problems, status)


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _cure(error: BaseException) -> str:
    """What helps where nobody listens at an address."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "; start sailord, or name another with --server (sailorctl up starts a cluster here)"
    return ""
