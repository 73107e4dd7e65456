"""Where pieces are read from: this node's snapshot memory, peers' agents, or durable storage.

Every source first lists its files and then serves their bytes.
"""

from __future__ import annotations

import http.client
import mmap
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from worker.checkpoint import snapshot_file
from worker.checkpoint.manifest import read_fields
from worker.checkpoint.reader import Reader

CONNECT_S = 2.0
TIMEOUT_S = 10.0
"""Seconds for a connected peer to answer."""
STORAGE_TIMEOUT_S = 120.0
"""Seconds for an agent to answer that reads from durable storage."""
REQUEST_BYTES_MAX = 32 << 20
"""The most that is asked of a peer at once."""
LISTINGS_MAX = 32
REFUSAL_BYTES_MAX = 500
"""The most bytes of a peer's refusal that are shown."""

PieceBytes = bytearray | memoryview
"""Writable, as torch wants it; writing to it changes no file."""


class SourceError(Exception):
    """A source does not answer, or answers wrongly."""


class UnreachableError(SourceError):
    """The connection to a node's agent failed."""

    def __init__(self, text: str, node: str) -> None:
        super().__init__(text)
        self.node = node


class PieceSource(Protocol):
    """A place that may have files of a snapshot."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def maps(self) -> bool:
        """Whether what it reads takes no memory of its own."""

    def files(self) -> Mapping[str, snapshot_file.Header]:
        """Return its sealed files."""

    def read(self, file: str, offset: int, size: int) -> PieceBytes:
        """Read some bytes of a file."""

    def close(self) -> None:
        """Release its connections."""


@dataclass(frozen=True, slots=True)
class LocalSource:
    """The files in this node's snapshot memory."""

    folder: Path
    name: str = "this node"
    maps: bool = True

    @classmethod
    def at(cls, memory: Path, job: str, *, generation: int, step: int) -> LocalSource:
        """Return the source of one snapshot."""
        return cls(snapshot_file.point_folder(memory, job, generation=generation, step=step))

    def files(self) -> Mapping[str, snapshot_file.Header]:
        return {found.path.name: found.header for found in snapshot_file.sealed_files(self.folder)}

    def read(self, file: str, offset: int, size: int) -> PieceBytes:
        if size == 0:
            return bytearray()  # Of layers that train nothing; mapping 0 bytes maps all.
        try:
            with (self.folder / file).open("rb") as opened:
                # Pages are read when they are used. No writer is left: the workers of the previous
                # generation have closed their files or were killed.
                begin = offset - offset % mmap.ALLOCATIONGRANULARITY
                how = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
                mapped = mmap.mmap(opened.fileno(), offset + size - begin, *how, offset=begin)
        except (OSError, ValueError) as error:
            raise SourceError(f"{self.name}: {file}: {error}") from None
        return memoryview(mapped)[offset - begin :]

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class PeerTls:
    """How peers' agents are verified; a worker itself has no certificate, but a grant."""

    context: ssl.SSLContext
    server: str
    """What follows the node's name in the name of an agent's certificate."""

    @classmethod
    def of(cls, said: Mapping[str, Any] | None) -> PeerTls | None:
        """Read what the agent says of it; ``None``: plain HTTP."""
        if said is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(said["ca"])
        if said["revoked"] is not None:
            context.load_verify_locations(said["revoked"])
            loaded = context.cert_store_stats()
            if loaded["crl"] >= loaded["x509_ca"]:  # A new authority may have no list yet.
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return cls(context, said["server"])


@dataclass(eq=False)
class PeerSource:
    """The files in another node's snapshot memory, served by its agent."""

    name: str
    address: str
    path: str
    reader: Reader
    tls: PeerTls | None = None
    node: str = ""
    """The node of the agent that serves it, if the source has another name."""
    life: str = ""
    """The node's id; empty if its lease had ended before: then nothing is expected of it."""
    timeout_s: float = TIMEOUT_S
    maps: bool = False
    _local: threading.local = field(default_factory=threading.local)
    _connections: list[http.client.HTTPConnection] = field(default_factory=list)
    _is_closed: bool = False

    @classmethod
    def at(
        cls,
        name: str,
        address: str,
        reader: Reader,
        job: str,
        tls: PeerTls | None = None,
        *,
        life: str = "",
        generation: int,
        step: int,
    ) -> PeerSource:
        """Return the source of one snapshot."""
        path = f"/v1/memory/{job}/{generation}-{step}"
        return cls(name, address, path, reader, tls, life=life)

    def files(self) -> Mapping[str, snapshot_file.Header]:
        status, body = self._get(self.path, {})
        if status == 404:
            return {}
        if status != 200:
            raise self._describe_refusal(self.name, status, body)
        try:
            return snapshot_file.listing_from(bytes(body), name=self.name)
        except snapshot_file.SnapshotError as error:
            raise SourceError(str(error)) from None

    def read(self, file: str, offset: int, size: int) -> PieceBytes:
        body = bytearray(size)
        for first in range(offset, offset + size, REQUEST_BYTES_MAX):
            count = min(REQUEST_BYTES_MAX, offset + size - first)
            wanted = {"Range": f"bytes={first}-{first + count - 1}"}
            status, part = self._get(f"{self.path}/{file}", wanted)
            if status != 206:
                raise self._describe_refusal(f"{self.name}: {file}:", status, part)
            if len(part) != count:
                raise SourceError(f"{self.name}: {file}: {len(part)} bytes instead of {count}")
            body[first - offset : first - offset + count] = part
        return body

    def close(self) -> None:
        self._is_closed = True
        for connection in self._connections:
            connection.close()

    def _describe_refusal(self, what: str, status: int, body: bytearray) -> SourceError:
        """Return the error of a refusal, with the first line of what the agent says."""
        said = body.partition(b"\n")[0][:REFUSAL_BYTES_MAX].decode(errors="replace").strip()
        return SourceError(f"{what} answers {status}{said and f': {said}'}")

    def _get(self, path: str, headers: dict[str, str]) -> tuple[int, bytearray]:
        """Send a request, on one connection for each thread; a new one if the agent closed it."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(
                self.address, timeout=CONNECT_S
            )
            self._connections.append(connection)
        is_reused = connection.sock is not None
        try:
            if connection.sock is None:
                _connect(connection, self.tls, self.node or self.name, self.timeout_s)
            span = headers.get("Range", "")
            shown = self.reader.headers(self.address, path, span, at=time.time())
            connection.request("GET", path, headers={**shown, **headers})
            answer = connection.getresponse()
            return answer.status, _read_all(answer)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if is_reused and isinstance(error, ConnectionError):
                return self._get(path, headers)
            text = f"{self.name}: {error or type(error).__name__}"
            raise UnreachableError(text, self.life) from None
        finally:
            if self._is_closed:  # This thread may have connected after that.
                connection.close()


def _connect(
    connection: http.client.HTTPConnection, tls: PeerTls | None, node: str, timeout_s: float
) -> None:
    connection.connect()
    if tls is not None:
        server = f"{node}.{tls.server}"
        connection.sock = tls.context.wrap_socket(connection.sock, server_hostname=server)
    connection.sock.settimeout(timeout_s)


def _read_all(answer: http.client.HTTPResponse) -> bytearray:
    if answer.length is None:
        return bytearray(answer.read())
    body = bytearray(answer.length)
    view, begin = memoryview(body), 0
    while begin < len(body):
        count = answer.readinto(view[begin:])
        if not count:
            raise http.client.IncompleteRead(bytes(body[:begin]))
        begin += count
    answer.read()
    return body


@dataclass(eq=False)
class DurableSource:
    """A committed checkpoint, read through its manifest; its objects are in the same folder."""

    manifest: str
    name: str = "durable storage"
    maps: bool = False
    _files: Any = None
    _folder: str = ""

    def files(self) -> Mapping[str, snapshot_file.Header]:
        import fsspec  # noqa: PLC0415 - slow and rarely needed

        try:
            self._files, path = fsspec.core.url_to_fs(self.manifest)
            self._folder = path.rpartition("/")[0]
            manifest = read_fields(self._files.cat_file(path), name=self.manifest)
            objects = manifest["objects"]
            with ThreadPoolExecutor(LISTINGS_MAX) as pool:
                headers = list(pool.map(self._header, objects))
            return {each["name"]: header for each, header in zip(objects, headers, strict=True)}
        except (SourceError, snapshot_file.SnapshotError) as error:
            raise SourceError(f"{self.name}: {error}") from None
        except Exception as error:  # Storage backends raise any exception.
            raise SourceError(f"{self.manifest}: {error or type(error).__name__}") from None

    def _header(self, about: Mapping[str, Any]) -> snapshot_file.Header:
        name = about["name"]
        head = self._range(name, 0, snapshot_file.ALIGN)
        length = snapshot_file.head_length(head, name=name)
        if length > len(head):
            head += self._range(name, len(head), length - len(head))
        if snapshot_file.head_checksum(head) != about["checksum"]:
            raise snapshot_file.SnapshotError(f"{name} is not the object that was committed")
        return snapshot_file.parse_head(head, name=name)

    def read(self, file: str, offset: int, size: int) -> PieceBytes:
        try:
            return bytearray(self._range(file, offset, size))
        except Exception as error:  # Storage backends raise any exception.
            raise SourceError(f"{self.name}: {file}: {error or type(error).__name__}") from None

    def _range(self, name: str, offset: int, size: int) -> bytes:
        path = f"{self._folder}/{name}"
        return bytes(self._files.cat_file(path, start=offset, end=offset + size))

    def close(self) -> None:
        return
