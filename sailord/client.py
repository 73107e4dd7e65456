"""Speaks to a sailord for the command line: over its Unix socket, or over TCP with a token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from sailord.local.place import Place, usual_folder
from simulator.errors import InputError, Problem

DEFAULT = "unix:///run/sailor/sailord.sock"
TIMEOUT_S = 20.0
FOLLOW_S = 60.0
"""Without even a sign of life for so long, a stream is broken."""


class ServerProblem(Exception):  # noqa: N818 - what the server said, for a person to read
    """sailord could not be reached, or did not do what was asked."""

    def __init__(self, said: str | Sequence[Problem]) -> None:
        text = said if isinstance(said, str) else "\n".join(map(str, said))
        super().__init__(text)
        self.problems = () if isinstance(said, str) else tuple(said)

    def about(self, sent: str, file: str) -> ServerProblem:
        """The same, in which what was sent as ``sent`` is called by its file's name."""
        if not self.problems:
            return self
        return ServerProblem([replace(each, place=_called(each.place, sent, file))
                              for each in self.problems])  # fmt: skip


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
            why = f"{_why(error)}{_cure(error)}"
            raise ServerProblem(f"{self.server} did not answer: {why}") from None
        finally:
            connection.close()
        is_json = "json" in (reply.headers.get("Content-Type") or "")
        value = json.loads(text) if is_json else text.decode("utf-8", "replace")
        if reply.status >= 400:
            raise _refused(reply.status, value)
        return value, reply.headers

    def follow(self, after: int) -> Iterator[dict[str, Any]]:
        """Happenings as they come, resumed by id where the connection breaks."""
        while True:
            connection = self._connect(FOLLOW_S)
            try:
                reply = self._send(connection, "GET", f"/v1/events?after={after}", None)
                if reply.status >= 400:
                    raise _refused(reply.status, json.loads(reply.read()))
                for line in reply:
                    if line.startswith(b"data: "):
                        happening = json.loads(line.removeprefix(b"data: "))
                        after = happening["id"]
                        yield happening
            except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
                if after == 0:
                    raise ServerProblem(f"{self.server}: {_why(error)}") from None
            except OSError as error:
                why = f"{_why(error)}{_cure(error)}"
                raise ServerProblem(f"{self.server} did not answer: {why}") from None
            finally:
                connection.close()

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
    local = Place(usual_folder(), port=0).socket
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


def _refused(status: int, value: Any) -> ServerProblem:
    if not isinstance(value, dict) or "problems" not in value:
        return ServerProblem(f"it answered {status}")
    problems = [Problem(p["place"], p["what"], p["cure"]) for p in value["problems"]]
    return ServerProblem(problems)


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _cure(error: BaseException) -> str:
    """What helps where nobody listens at an address."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "; start sailord, or name another with --server (sailorctl up starts a cluster here)"
    return ""
