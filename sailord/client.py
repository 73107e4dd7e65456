"""HTTP client of sailord's API, over its Unix socket or over TCP with a token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from agents.daemon.backoff import Backoff
from simulator.documents.problems import InputError, Problem

if TYPE_CHECKING:
    from agents.rpc.tls import Tls

T = TypeVar("T")
DEFAULT = "unix:///run/sailor/sailord.sock"
LOCAL_SOCKET = Path("head", "sailord.sock")
"""The API socket within the folder of a local cluster."""
TIMEOUT_S = 20.0
FOLLOW_S = 60.0
"""A stream is broken after this time without a keepalive."""
_OTHER_SERVER = "is it the address of sailord, and not of a proxy before it?"
PAUSE_S_FIRST = 0.25
PAUSE_S_MAX = 5.0
"""First and longest pause between reconnection attempts."""
REPEATS_AFTER_S = (0.5, 2.0)
"""Pauses after which an order whose answer was lost is repeated."""


class ServerProblem(Exception):  # noqa: N818 - an answer of the server, shown to the user
    """sailord is unreachable or refused a request."""

    def __init__(
        self, said: str | Sequence[Problem], status: int | None = None, *, in_doubt: bool = False
    ) -> None:
        text = said if isinstance(said, str) else "\n".join(map(str, said))
        super().__init__(text)
        self.problems = () if isinstance(said, str) else tuple(said)
        self.status = status
        """HTTP status; ``None``: no answer."""
        self.in_doubt = in_doubt
        """What was asked for may have been done all the same."""
        self.is_repeated = False
        """It answers a repetition of a request whose first answer was lost."""

    @property
    def passes(self) -> bool:
        """Whether a retry may succeed: unreachable, no leader yet, or too many requests."""
        return self.status is None or self.status in {408, 429, 502, 503}

    def about(self, sent: str, file: str) -> ServerProblem:
        """The same problem, with ``sent`` replaced by the name of the submitted file."""
        if not self.problems:
            return self
        called = [
            replace(each, place=_rename_place(each.place, sent, file)) for each in self.problems
        ]
        return ServerProblem(called, self.status, in_doubt=self.in_doubt)


def _rename_place(place: str, sent: str, file: str) -> str:
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


class _Encrypted(http.client.HTTPConnection):
    """HTTP over TLS with certificates of the cluster's authority."""

    def __init__(self, host: str, port: int | None, tls: Tls, timeout_s: float) -> None:
        super().__init__(host, port or 443, timeout=timeout_s)
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        name = self._tls.server_name("sailord")
        self.sock = self._tls.client.wrap_socket(self.sock, server_hostname=name)


@dataclass(eq=False)
class Reconnector:
    """Reconnects a follower with backoff, since sailord may be restarted meanwhile.

    A server that has never answered is not retried: its address may be wrong.
    """

    tell: Callable[[ServerProblem], None]
    """Called at the begin of an outage, not at each attempt."""
    _backoff: Backoff = field(default_factory=lambda: Backoff(PAUSE_S_FIRST, PAUSE_S_MAX))
    _has_answered: bool = False
    _is_away: bool = False

    def answered(self) -> None:
        """Note an answer: the backoff starts over."""
        self._backoff.reset()
        self._has_answered, self._is_away = True, False

    def wait(self, problem: ServerProblem) -> None:
        """Sleep until the next attempt; raises a problem that a retry cannot solve."""
        if not problem.passes or (problem.status is None and not self._has_answered):
            raise problem
        self._has_answered |= problem.status is not None
        if not self._is_away:
            self._is_away = True
            self.tell(problem)
        time.sleep(self._backoff.next_s())

    def insist(self, ask: Callable[[], T]) -> T:
        """Retry until there is an answer."""
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
    """A client of one sailord."""

    server: str
    token: str | None = None
    tls: Tls | None = None
    """Our certificate, and the authority that must have issued sailord's."""

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request, with bytes or JSON; return the decoded JSON, or the text."""
        value, headers = self._exchange(method, path, body)
        if path.startswith("/v1/") and "json" not in (headers.get("Content-Type") or ""):
            what = f"{self.server} answered something else than JSON"
            raise ServerProblem(f"{what}: {_OTHER_SERVER}", 200)
        return value

    def order(self, path: str, body: dict[str, Any]) -> Any:
        """Give an order under an id of its own; if the answer is lost, repeat it with that id."""
        body = {"id": uuid.uuid4().hex, **body}
        for attempt, pause_s in enumerate((*REPEATS_AFTER_S, None)):
            try:
                return self.ask("POST", path, body)
            except ServerProblem as problem:
                problem.is_repeated = attempt > 0
                if not problem.in_doubt:
                    raise
                if pause_s is None:
                    cure = f"it may have been taken; with the id {body['id']} it counts only once"
                    raise ServerProblem(f"{problem}; {cure}", problem.status) from None
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def log(self, node: str, rank: int | None, mark: str, which: str = "") -> tuple[str, str, int]:
        """Logs of a node's workers since the mark or their end, the next mark, and of how many
        ended workers the node keeps logs. ``which``: ``setup`` or ``ended`` instead."""
        asked = {"after": mark} | ({} if rank is None else {"rank": rank})
        asked |= {which: "true"} if which else {}
        text, headers = self._exchange("GET", f"/v1/nodes/{part(node)}/logs?{urlencode(asked)}")
        ended = headers.get("Sailor-Log-Ended", "0")  # An older sailord does not say it.
        return str(text), headers.get("Sailor-Log-Mark", ""), int(ended)

    def _exchange(
        self, method: str, path: str, body: object = None
    ) -> tuple[Any, http.client.HTTPMessage]:
        connection, is_sent = self._connect(TIMEOUT_S), False
        try:
            connection.connect()
            is_sent = True
            reply = self._send(connection, method, path, body)
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            # TLS 1.3 tells of a refused certificate at the first answer.
            in_doubt = is_sent and not isinstance(error, ssl.SSLError)
            raise self._no_answer(error, in_doubt=in_doubt) from None
        finally:
            connection.close()
        value = _value(reply.headers, text)
        if reply.status not in range(200, 300) and reply.status < 400:
            what = f"{self.server} answered {reply.status}: {_OTHER_SERVER}"
            raise ServerProblem(what, reply.status)
        if reply.status >= 400:
            raise _read_refusal(reply.status, value)
        return value, reply.headers

    def follow(self, after: int, reconnector: Reconnector) -> Iterator[dict[str, Any]]:
        """Yield events as they occur; reconnects and resumes by id."""
        while True:
            try:
                for happening in self._stream(after, reconnector):
                    reconnector.answered()
                    after = happening["id"]
                    yield happening
            except ServerProblem as problem:
                reconnector.wait(problem)

    def _stream(self, after: int, reconnector: Reconnector) -> Iterator[dict[str, Any]]:
        connection = self._connect(FOLLOW_S)
        try:
            reply = self._send(connection, "GET", f"/v1/events?after={after}", None)
            if reply.status != 200:
                raise _read_refusal(reply.status, _value(reply.headers, reply.read()))
            reconnector.answered()  # There may be no event for a long time.
            for line in reply:
                # A broken connection may truncate a line.
                if line.startswith(b"data: ") and line.endswith(b"\n"):
                    yield json.loads(line.removeprefix(b"data: "))
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()
        raise ServerProblem(f"{self.server} closed the stream")

    def _no_answer(
        self, error: OSError | http.client.HTTPException, *, in_doubt: bool = False
    ) -> ServerProblem:
        what = f"{self.server} did not answer: {_why(error)}{_cure(error)}"
        return ServerProblem(what, in_doubt=in_doubt)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        with contextlib.suppress(ValueError):  # The port may be no number.
            parts = urlsplit(self.server)
            host, port = parts.hostname, parts.port
            if parts.scheme == "unix" and parts.path:
                return _Local(parts.path, timeout_s)
            if parts.scheme == "https" and host and self.tls is not None:
                return _Encrypted(host, port, self.tls, timeout_s)
            if parts.scheme in ("http", "https") and host:
                is_safe = parts.scheme == "https"
                kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
                return kind(host, port, timeout=timeout_s)
        cure = "use unix:///run/sailor/sailord.sock or https://HOST:PORT"
        raise InputError(Problem("--server", f'"{self.server}" is not an address', cure))

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        raw = body
        if not isinstance(raw, bytes | None):
            raw = json.dumps(body).encode()
        connection.request(method, path, raw, headers)
        return connection.getresponse()


def client_from(
    server: str | None,
    token_file: Path | None,
    tls: Path | None = None,
    *,
    insecure: bool = False,
) -> Client:
    """Make a client from command-line options and environment.

    ``tls`` is a folder that ``sailorctl ca issue`` wrote.
    """
    token = None
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="ascii").strip()
            if len(token.split()) != 1:
                raise UnicodeError("it must hold one token and nothing else")
        except (OSError, UnicodeError) as error:
            what, cure = f"cannot be read: {_why(error)}", "name a file that contains the token"
            raise InputError(Problem(str(token_file), what, cure)) from None
    address = server or os.environ.get("SAILOR_SERVER") or _default_server()
    if urlsplit(address).scheme == "http" and not insecure and not _is_local(address):
        cure = "use https:// with --tls FOLDER (docs/security.md), or add --insecure"
        raise InputError(Problem("--server", f"{address} would get the token in clear", cure))
    return Client(address, token, None if tls is None else _tls_of(tls))


def _is_local(address: str) -> bool:
    from agents.rpc.tls import is_this_machine  # noqa: PLC0415 - slow to import, see ADR 87

    return is_this_machine(urlsplit(address).hostname or "")


def _tls_of(folder: Path) -> Tls:
    from agents.rpc.tls import Tls, TlsFiles  # noqa: PLC0415 - slow to import, see ADR 87

    ca, certificate, key = (folder / name for name in ("ca.pem", "certificate.pem", "key.pem"))
    revoked = folder / "revoked.pem"
    files = TlsFiles(ca, certificate, key, revoked if revoked.exists() else None)
    return Tls(files, None, "user")


def _default_server() -> str:
    """The system's sailord; if there is none, that of the user's local cluster."""
    local = default_folder() / LOCAL_SOCKET
    if Path(DEFAULT.removeprefix("unix://")).exists():
        return DEFAULT
    with contextlib.suppress(OSError):
        # Any user could create that folder; trust only our own.
        if local.stat().st_uid == os.getuid():
            return f"unix://{local}"
    return DEFAULT


def default_folder() -> Path:
    """Return the folder of the user's local cluster (``sailorctl up``)."""
    return Path(tempfile.gettempdir()) / f"sailor-{os.getuid()}"


def part(name: str) -> str:
    """Quote a name as one part of a path."""
    return quote(name, safe="")


def status_path(job: str | None) -> str:
    """Return where the status is; of a job beside others, if one is named."""
    return "/v1/status" if job is None else f"/v1/status?job={part(job)}"


def _value(headers: http.client.HTTPMessage, text: bytes) -> Any:
    if "json" in (headers.get("Content-Type") or ""):
        with contextlib.suppress(ValueError):  # A proxy may send invalid JSON.
            return json.loads(text)
    return text.decode("utf-8", "replace")


def _read_refusal(status: int, value: Any) -> ServerProblem:
    in_doubt = status in {502, 503, 504}
    try:
        problems = [Problem(p["place"], p["what"], p["cure"]) for p in value["problems"]]
    except (KeyError, TypeError):
        return ServerProblem(f"it answered {status}", status, in_doubt=in_doubt)
    return ServerProblem(problems, status, in_doubt=in_doubt)


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        from agents.rpc.tls import explain  # noqa: PLC0415 - slow to import, see ADR 87

        return explain(error)
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return f"{error}; it may require TLS (docs/security.md)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _cure(error: BaseException) -> str:
    """What to do if there is no server at the address."""
    cure = "; start sailord, or name another with --server (sailorctl up starts a local cluster)"
    if isinstance(error, PermissionError):
        return "; only root and the user sailor may use it: others name --server and --token-file"
    return cure if isinstance(error, FileNotFoundError | ConnectionRefusedError) else ""
