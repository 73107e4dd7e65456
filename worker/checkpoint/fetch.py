"""Finds the pieces that a rank needs: on its own node, at peers' agents, in the durable store.

Every source tells first which files it has, then gives their bytes. A piece is taken from the
first source that gives it unharmed; what went wrong with the others is kept, and said if nobody
has it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from worker.checkpoint.placement import PieceKey
from worker.checkpoint.snapshot_file import (
    ALIGN,
    Header,
    Piece,
    SnapshotError,
    check_piece,
    head_checksum,
    head_length,
    listing_from,
    parse_head,
    point_folder,
    sealed_files,
)

TICKET_HEADER = "Sailor-Ticket"
CONNECT_S = 2.0
TIMEOUT_S = 10.0
"""For a peer that was reached to go on answering."""
REQUEST_BYTES_MAX = 32 << 20
AT_ONCE = 4
"""So many requests are under way at a time."""
LISTED_AT_ONCE = 32

Body = bytearray | memoryview
"""Writable, as torch likes it; what is written there changes no file."""


class SourceError(Exception):
    """A source does not answer, or not what it should."""


class PieceNotFoundError(Exception):
    """Some piece is nowhere unharmed; the message says which and why."""


class Source(Protocol):
    """A place where there may be files of a point."""

    @property
    def name(self) -> str:
        """What it is called in what is said."""

    def files(self) -> Mapping[str, Header]:
        """The sealed files that it has."""

    def read(self, file: str, offset: int, size: int) -> Body:
        """Some bytes of one of them."""

    def close(self) -> None:
        """Nothing more is asked."""


@dataclass(frozen=True, slots=True)
class FetchedPieces:
    """All that was asked for."""

    header: Header
    """Of one of the files: what it says of the job is the same in all."""
    bodies: dict[PieceKey, Body]
    bytes_by_source: dict[str, int]
    complaints: tuple[str, ...]
    """What was wrong on the way, though another source made up for it."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One file of one source that has a piece."""

    source: Source
    file: str
    piece: Piece


def fetch(
    keys: Iterable[PieceKey],
    groups: Sequence[Sequence[Source]],
    *,
    model: str,
    check_cancelled: Callable[[], None] = lambda: None,
) -> FetchedPieces:
    """Get all pieces; of the sources those of the first group are preferred, and so on.

    Within a group, whoever answers first gives first: one that is gone holds up nobody who does
    not need it. ``check_cancelled`` raises when nobody wants the result any more.
    """
    search = _Search(model, check_cancelled, set(keys))
    pools = ThreadPoolExecutor(LISTED_AT_ONCE), ThreadPoolExecutor(AT_ONCE)
    try:
        for group in groups:
            if search.is_done():
                break
            asked = {pools[0].submit(source.files): source for source in group}
            for answer in as_completed(asked):
                search.look_at(asked[answer], answer, pools[1])
                if search.is_done():
                    break
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for source in itertools.chain.from_iterable(groups):
            source.close()
    if search.header is None or search.missing:
        raise PieceNotFoundError(_nowhere(search.missing, search.complaints))
    return FetchedPieces(
        search.header, search.bodies, search.bytes_by_source, tuple(search.complaints)
    )


@dataclass(eq=False)
class _Search:
    """What was found so far."""

    model: str
    check_cancelled: Callable[[], None]
    missing: set[PieceKey]
    header: Header | None = None
    bodies: dict[PieceKey, Body] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    tried: set[tuple[str, str, PieceKey]] = field(default_factory=set)

    def is_done(self) -> bool:
        return not self.missing and self.header is not None

    def look_at(
        self, source: Source, answer: Future[Mapping[str, Header]], pool: ThreadPoolExecutor
    ) -> None:
        """Take from a source what it has of what is missing."""
        self.check_cancelled()
        try:
            files = self._useful(source, answer.result())
        except SourceError as error:
            self.complaints.append(str(error))
            return
        # What one of its files has damaged, another may have whole.
        while runs := list(_joined(self.offers(source, files))):
            for body, run in pool.map(self.read, runs):
                self.take(body, run)
            self.missing -= self.bodies.keys()

    def _useful(self, source: Source, files: Mapping[str, Header]) -> dict[str, Header]:
        others = [file for file, header in files.items() if header.model != self.model]
        self.complaints += [f"{source.name}: {file} is of another model" for file in others]
        useful = {file: files[file] for file in sorted(files.keys() - set(others))}
        self.header = self.header or next(iter(useful.values()), None)
        return useful

    def offers(self, source: Source, files: Mapping[str, Header]) -> Iterator[list[_Candidate]]:
        """File by file what of the missing was not tried there yet; each piece once."""
        offered: set[PieceKey] = set()
        for file, header in files.items():
            wanted = [
                _Candidate(source, file, piece)
                for piece in header.pieces
                if piece.key in self.missing - offered
                and (source.name, file, piece.key) not in self.tried
            ]
            offered |= {offer.piece.key for offer in wanted}
            self.tried |= {(source.name, file, offer.piece.key) for offer in wanted}
            yield wanted

    def read(self, offers: list[_Candidate]) -> tuple[Body | str, list[_Candidate]]:
        """Read pieces that lie one after the other."""
        first, last = offers[0].piece, offers[-1].piece
        try:
            self.check_cancelled()
            size = last.offset + last.bytes - first.offset
            return offers[0].source.read(offers[0].file, first.offset, size), offers
        except SourceError as error:
            return str(error), offers

    def take(self, body: Body | str, offers: list[_Candidate]) -> None:
        """Keep what is as it was sealed."""
        if isinstance(body, str):
            self.complaints.append(body)
            return
        view = memoryview(body)
        for offer in offers:
            source, piece = offer.source, offer.piece
            begin = piece.offset - offers[0].piece.offset
            part = view[begin : begin + piece.bytes]
            try:
                check_piece(part, piece, name=f"{source.name}: {offer.file}")
            except SnapshotError as error:
                self.complaints.append(str(error))
                continue
            self.bodies[piece.key] = part
            before = self.bytes_by_source.get(source.name, 0)
            self.bytes_by_source[source.name] = before + piece.bytes


def _joined(offers: Iterable[list[_Candidate]]) -> Iterator[list[_Candidate]]:
    """Pieces that lie side by side are read together."""
    for of_file in offers:
        run: list[_Candidate] = []
        for offer in sorted(of_file, key=lambda offer: offer.piece.offset):
            if run:
                end = run[-1].piece.offset + run[-1].piece.bytes
                size = offer.piece.offset + offer.piece.bytes - run[0].piece.offset
                if offer.piece.offset - end >= ALIGN or size > REQUEST_BYTES_MAX:
                    yield run
                    run = []
            run.append(offer)
        if run:
            yield run


def _nowhere(missing: set[PieceKey], complaints: list[str]) -> str:
    shown = ", ".join(f"piece {p} of layer {n}" for n, p in sorted(missing)[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    what = f"nobody has {shown}{more}" if missing else "nobody has anything of this point"
    return "; ".join([what, *complaints[:5]])


# ---- sources ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalSource:
    """The files in this node's memory."""

    folder: Path
    name: str = "this node"

    @classmethod
    def at(cls, memory: Path, job: str, *, generation: int, step: int) -> LocalSource:
        """Those of one point."""
        return cls(point_folder(memory, job, generation=generation, step=step))

    def files(self) -> Mapping[str, Header]:
        return {found.path.name: found.header for found in sealed_files(self.folder)}

    def read(self, file: str, offset: int, size: int) -> Body:
        try:
            with (self.folder / file).open("rb") as opened:
                # Nothing is read before it is needed. Whoever wrote it is not at it any more:
                # a node's workers of the generation before have left, or were killed.
                whole = mmap.mmap(
                    opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise SourceError(f"{self.name}: {file}: {error}") from None
        return memoryview(whole)[offset : offset + size]

    def close(self) -> None:
        return


@dataclass(eq=False)
class PeerSource:
    """The files in another node's memory, which its agent gives out."""

    name: str
    address: str
    path: str
    ticket: str
    _lines: threading.local = field(default_factory=threading.local)
    _open: list[http.client.HTTPConnection] = field(default_factory=list)

    @classmethod
    def at(
        cls, name: str, address: str, ticket: str, job: str, *, generation: int, step: int
    ) -> PeerSource:
        """Those of one point."""
        return cls(name, address, f"/v1/memory/{job}/{generation}-{step}", ticket)

    def files(self) -> Mapping[str, Header]:
        status, body = self._get(self.path, {})
        if status == 404:
            return {}
        if status != 200:
            raise SourceError(f"{self.name} answers {status}")
        try:
            return listing_from(bytes(body), name=self.name)
        except SnapshotError as error:
            raise SourceError(str(error)) from None

    def read(self, file: str, offset: int, size: int) -> Body:
        wanted = {"Range": f"bytes={offset}-{offset + size - 1}"}
        status, body = self._get(f"{self.path}/{file}", wanted)
        if status != 206 or len(body) != size:
            raise SourceError(f"{self.name}: {file}: {status}, {len(body)} bytes of {size}")
        return body

    def close(self) -> None:
        for line in self._open:
            line.close()

    def _get(self, path: str, headers: dict[str, str]) -> tuple[int, bytearray]:
        """Ask, on a connection that each thread keeps."""
        line = getattr(self._lines, "line", None)
        if line is None:
            line = self._lines.line = http.client.HTTPConnection(self.address, timeout=CONNECT_S)
            self._open.append(line)
        try:
            if line.sock is None:
                _connect(line)
            line.request("GET", path, headers={TICKET_HEADER: self.ticket, **headers})
            answer = line.getresponse()
            return answer.status, _all_of(answer)
        except (OSError, http.client.HTTPException) as error:
            line.close()
            raise SourceError(f"{self.name}: {error or type(error).__name__}") from None


def _connect(line: http.client.HTTPConnection) -> None:
    line.connect()
    line.sock.settimeout(TIMEOUT_S)


def _all_of(answer: http.client.HTTPResponse) -> bytearray:
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
    """A committed checkpoint, read through its manifest; the objects stand beside it."""

    manifest: str
    name: str = "the durable store"
    _files: Any = None
    _folder: str = ""

    def files(self) -> Mapping[str, Header]:
        import fsspec  # noqa: PLC0415 - slow and rarely needed

        try:
            self._files, path = fsspec.core.url_to_fs(self.manifest)
            self._folder = path.rpartition("/")[0]
            manifest = json.loads(self._files.cat_file(path))
            return {each["name"]: self._header(each) for each in manifest["objects"]}
        except (SourceError, SnapshotError) as error:
            raise SourceError(f"{self.name}: {error}") from None
        except Exception as error:  # Backends raise what they like.
            raise SourceError(f"{self.manifest}: {error or type(error).__name__}") from None

    def _header(self, about: Mapping[str, Any]) -> Header:
        name = about["name"]
        head = self._range(name, 0, ALIGN)
        length = head_length(head, name=name)
        if length > len(head):
            head += self._range(name, len(head), length - len(head))
        if head_checksum(head) != about["checksum"]:
            raise SnapshotError(f"{name} is not the object that was committed")
        return parse_head(head, name=name)

    def read(self, file: str, offset: int, size: int) -> Body:
        try:
            return bytearray(self._range(file, offset, size))
        except Exception as error:  # Backends raise what they like.
            raise SourceError(f"{self.name}: {file}: {error or type(error).__name__}") from None

    def _range(self, name: str, offset: int, size: int) -> bytes:
        path = f"{self._folder}/{name}"
        return bytes(self._files.cat_file(path, start=offset, end=offset + size))

    def close(self) -> None:
        return
