"""Data from the web: redirects and names that lead into the private network get nothing."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.daemon import allowed_uris
from agents.daemon.allowed_uris import MOUNTS
from agents.work import public_https
from agents.work.mounts import MountError, _copy
from sailord.authority import Authority
from tests.local_http import QuietHandler

PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"
"""The first stands for an address of the internet."""


class Server(http.server.ThreadingHTTPServer):
    """Answers with what it has, or sends elsewhere."""

    def __init__(self, host: str, leads_to: dict[str, str]) -> None:
        super().__init__((host, 0), Handler)
        self.leads_to = leads_to
        self.asked: list[str] = []

    @property
    def port(self) -> int:
        return self.server_address[1]


class Handler(QuietHandler):
    server: Server

    def reply(self) -> None:
        self.server.asked.append(self.path)
        where = self.server.leads_to.get(self.path)
        self.send_response(200 if where is None else 302)
        if where is not None:
            self.send_header("Location", where)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")


@contextmanager
def served(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, ...]]:
    """One on the internet and two in the private network, the last of them without TLS."""
    authority = Authority.create(tmp_path / "ca", "test")
    names = ["files.test", "inside.test", PUBLIC, PRIVATE]
    authority.issue("store", "web", tmp_path / "web", hosts=names)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "web/certificate.pem", tmp_path / "web/key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "web/ca.pem"))
    hosts = {"files.test": PUBLIC, "inside.test": PRIVATE}
    look_up, is_public = socket.getaddrinfo, allowed_uris.is_public

    def resolved(host: str, *rest: Any, **more: Any) -> Any:
        return look_up(hosts.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for module in (allowed_uris, public_https):
        monkeypatch.setattr(module, "is_public", lambda each: each == PUBLIC or is_public(each))
    found = Server(PUBLIC, {}), Server(PRIVATE, {}), Server(PRIVATE, {})
    for each in found[:2]:
        each.socket = tls.wrap_socket(each.socket, server_side=True)
    with served(found[0]), served(found[1]), served(found[2]):
        yield found


def copy(uri: str, folder: Path, *allowed: str) -> bytes:
    _copy("x", uri, folder / "copy", allowed or MOUNTS.default)
    return (folder / "copy").read_bytes()


def test_a_public_address_is_read_and_so_is_one_that_the_operator_names(servers, tmp_path):
    public, inside, _ = servers
    public.leads_to["/moved"] = "/data"
    assert copy(f"https://files.test:{public.port}/moved", tmp_path) == b"secret"
    host = f"https://inside.test:{inside.port}"
    assert copy(f"{host}/data", tmp_path, "https://", f"{host}/") == b"secret"


@pytest.mark.parametrize(
    "where",
    [
        "https://inside.test:{inside}/data",
        "https://127.0.0.1:{inside}/data",
        "https://0x7f000001:{inside}/data",
        "http://127.0.0.1:{plain}/data",
        "http://files.test:{plain}/data",
    ],
)
@pytest.mark.parametrize("is_redirect", [True, False])
def test_nothing_leads_into_the_private_network(servers, tmp_path, where, is_redirect):
    public, inside, plain = servers
    where = where.format(inside=inside.port, plain=plain.port)
    public.leads_to["/data"] = where
    uri = f"https://files.test:{public.port}/data" if is_redirect else where
    with pytest.raises(MountError, match=r"not allowed|no public address|not where"):
        copy(uri, tmp_path)
    assert not inside.asked
    assert not plain.asked
    assert bool(public.asked) == is_redirect


def test_a_host_that_the_operator_names_leads_to_no_other(servers, tmp_path):
    public, inside, _ = servers
    inside.leads_to["/data"] = f"https://127.0.0.1:{inside.port}/other"
    host = f"https://inside.test:{inside.port}"
    with pytest.raises(MountError, match="which is not allowed"):
        copy(f"{host}/data", tmp_path, f"{host}/")
    inside.leads_to["/data"] = f"https://files.test:{public.port}/other"
    with pytest.raises(MountError, match="whose host no allowed prefix names"):
        copy(f"{host}/data", tmp_path, f"{host}/", "https://")
    assert not public.asked
    assert "/other" not in inside.asked
