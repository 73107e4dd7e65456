"""Fetches the pieces that a rank needs: from its own node, peers' agents, or durable storage.

Every source first lists its files and then serves their bytes. A piece is taken from the first
source whose bytes match the checksum. Problems with other sources are collected and reported if no
source has the piece.
"""

from __future__ import annotations

import http.client
import itertools
import mmap
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from worker.checkpoint import snapshot_file
from worker.checkpoint.manifest import read_fields
from worker.checkpoint.placement import PieceKey
from worker.checkpoint.reader import Reader

CONNECT_S = 2.0
TIMEOUT_S = 10.0
"""Seconds for a connected peer to answer."""
STORAGE_TIMEOUT_S = 120.0
"""Seconds for an agent to answer that reads from durable storage."""
REQUEST_BYTES_MAX = 32 << 20
"""The most that is asked of a peer at once."""
READS_MAX = 4
"""Concurrent read requests."""
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


class PieceNotFoundError(Exception):
    """No source has an intact copy of some piece; the message says which and why."""

    def __init__(self, text: str, unreachable: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.unreachable = frozenset(unreachable)
        """The nodes that may have had it: they were there, and do not answer now."""


class PieceSource(Protocol):
    """A place that may have files of a snapshot."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def files(self) -> Mapping[str, snapshot_file.Header]:
        """Return its sealed files."""

    def read(self, file: str, offset: int, size: int) -> PieceBytes:
        """Read some bytes of a file."""

    def close(self) -> None:
        """Release its connections."""


@dataclass(frozen=True, slots=True)
class FetchedPieces:
    """All requested pieces."""

    header: snapshot_file.Header
    """The header of one of the files; job and progress are the same in all of them."""
    bodies: dict[PieceKey, PieceBytes]
    bytes_by_source: dict[str, int]
    problems: tuple[str, ...]
    """Problems that another source made up for."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A piece in one file of one source."""

    source: PieceSource
    file: str
    piece: snapshot_file.Piece


def fetch(
    keys: Iterable[PieceKey],
    groups: Sequence[Sequence[PieceSource]],
    *,
    model: str,
    check_cancelled: Callable[[], None] = lambda: None,
) -> FetchedPieces:
    """Fetch all pieces, preferring sources of earlier groups.

    Within a group, sources are used in the order in which they answer, so a dead one delays only
    what it alone has. ``check_cancelled`` raises once the generation is over.
    """
    search = _Search(model, check_cancelled, set(keys))
    pools = ThreadPoolExecutor(LISTINGS_MAX), ThreadPoolExecutor(READS_MAX)
    try:
        for group in groups:
            if search.is_done():
                break
            asked = {pools[0].submit(source.files): source for source in group}
            for answer in as_completed(asked):
                search.take_from(asked[answer], answer, pools[1])
                if search.is_done():
                    break
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for source in itertools.chain.from_iterable(groups):
            source.close()
    if search.header is None or search.missing:
        message = _not_found_message(search.missing, search.problems)
        raise PieceNotFoundError(message, search.unreachable)
    return FetchedPieces(
        search.header, search.bodies, search.bytes_by_source, tuple(search.problems)
    )


@dataclass(eq=False)
class _Search:
    """What has been found so far."""

    model: str
    check_cancelled: Callable[[], None]
    missing: set[PieceKey]
    header: snapshot_file.Header | None = None
    bodies: dict[PieceKey, PieceBytes] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreachable: set[str] = field(default_factory=set)
    tried: set[tuple[str, str, PieceKey]] = field(default_factory=set)

    def is_done(self) -> bool:
        return not self.missing and self.header is not None

    def take_from(
        self,
        source: PieceSource,
        answer: Future[Mapping[str, snapshot_file.Header]],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Take the missing pieces that a source has."""
        self.check_cancelled()
        try:
            files = self._select_matching(source, answer.result())
        except SourceError as error:
            self.note(error)
            return
        # A piece that is damaged in one file may be intact in another.
        while runs := list(_group_adjacent(self.candidates(source, files))):
            for body, run in pool.map(self.read, runs):
                self.keep(body, run)
            self.missing -= self.bodies.keys()

    def note(self, error: SourceError) -> None:
        """Note a source's problem, and whose connection failed."""
        self.problems.append(str(error))
        if isinstance(error, UnreachableError) and error.node:
            self.unreachable.add(error.node)

    def _select_matching(
        self, source: PieceSource, files: Mapping[str, snapshot_file.Header]
    ) -> dict[str, snapshot_file.Header]:
        others = [file for file, header in files.items() if header.model != self.model]
        self.problems += [f"{source.name}: {file} is of another model" for file in others]
        matching = {file: files[file] for file in sorted(files.keys() - set(others))}
        self.header = self.header or next(iter(matching.values()), None)
        return matching

    def candidates(
        self, source: PieceSource, files: Mapping[str, snapshot_file.Header]
    ) -> Iterator[list[_Candidate]]:
        """Yield, for each file, the missing pieces that were not tried there; each piece once."""
        listed: set[PieceKey] = set()
        for file, header in files.items():
            wanted = [
                _Candidate(source, file, piece)
                for piece in header.pieces
                if piece.key in self.missing - listed
                and (source.name, file, piece.key) not in self.tried
            ]
            listed |= {candidate.piece.key for candidate in wanted}
            self.tried |= {(source.name, file, candidate.piece.key) for candidate in wanted}
            yield wanted

    def read(
        self, candidates: list[_Candidate]
    ) -> tuple[PieceBytes | SourceError, list[_Candidate]]:
        """Read adjacent pieces with one request."""
        first, last = candidates[0].piece, candidates[-1].piece
        try:
            self.check_cancelled()
            size = last.offset + last.bytes - first.offset
            return candidates[0].source.read(candidates[0].file, first.offset, size), candidates
        except SourceError as error:
            return error, candidates

    def keep(self, body: PieceBytes | SourceError, candidates: list[_Candidate]) -> None:
        """Keep the pieces whose checksums match."""
        if isinstance(body, SourceError):
            self.note(body)
            return
        view = memoryview(body)
        for candidate in candidates:
            source, piece = candidate.source, candidate.piece
            begin = piece.offset - candidates[0].piece.offset
            part = view[begin : begin + piece.bytes]
            try:
                snapshot_file.check_piece(part, piece, name=f"{source.name}: {candidate.file}")
            except snapshot_file.SnapshotError as error:
                self.problems.append(str(error))
                continue
            self.bodies[piece.key] = part
            before = self.bytes_by_source.get(source.name, 0)
            self.bytes_by_source[source.name] = before + piece.bytes


def _group_adjacent(candidates: Iterable[list[_Candidate]]) -> Iterator[list[_Candidate]]:
    """Group adjacent pieces, so that they are read together."""
    for of_file in candidates:
        run: list[_Candidate] = []
        for candidate in sorted(of_file, key=lambda candidate: candidate.piece.offset):
            if run:
                end = run[-1].piece.offset + run[-1].piece.bytes
                size = candidate.piece.offset + candidate.piece.bytes - run[0].piece.offset
                if candidate.piece.offset - end >= snapshot_file.ALIGN or size > REQUEST_BYTES_MAX:
                    yield run
                    run = []
            run.append(candidate)
        if run:
            yield run


def _not_found_message(missing: set[PieceKey], problems: list[str]) -> str:
    shown = ", ".join(f"piece {p} of layer {n}" for n, p in sorted(missing)[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    what = f"no source has {shown}{more}" if missing else "no source has any file of this snapshot"
    return "; ".join([what, *problems[:5]])


# ---- sources ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalSource:
    """The files in this node's snapshot memory."""

    folder: Path
    name: str = "this node"

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
