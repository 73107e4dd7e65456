"""Fetches the pieces that a rank needs: from its own node, peers' agents, or durable storage.

A piece is taken from the first source whose bytes match the checksum. Problems with other sources
are collected and reported if no source has the piece.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from worker.checkpoint import snapshot_file
from worker.checkpoint.piece_queue import PieceQueue
from worker.checkpoint.piece_sources import (
    LISTINGS_MAX,
    REQUEST_BYTES_MAX,
    PieceBytes,
    PieceSource,
    SourceError,
    UnreachableError,
)
from worker.checkpoint.placement import PieceKey

READS_MAX = 4
"""Concurrent read requests."""
_POLL_S = 0.05


class PieceNotFoundError(Exception):
    """No source has an intact copy of some piece; the message says which and why."""

    def __init__(self, text: str, unreachable: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.unreachable = frozenset(unreachable)
        """The nodes that may have had it: they were there, and do not answer now."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Where the pieces came from."""

    header: snapshot_file.Header
    """The header of one of the files; job and progress are the same in all of them."""
    bytes_by_source: dict[str, int]
    problems: tuple[str, ...]
    """Problems that another source made up for."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A piece in one file of one source."""

    source: PieceSource
    file: str
    piece: snapshot_file.Piece

    @property
    def held(self) -> int:
        """The bytes of memory that it takes once it is read."""
        return 0 if self.source.maps else self.piece.bytes


def fetch(
    wanted: Mapping[PieceKey, bool],
    groups: Sequence[Sequence[PieceSource]],
    *,
    model: str,
    into: PieceQueue,
    check_cancelled: Callable[[], None] = lambda: None,
) -> FetchReport:
    """Fetch all wanted pieces, with or without their moments, preferring sources of earlier groups.

    Within a group, sources are used in the order in which they answer, so a dead one delays only
    what it alone has. ``check_cancelled`` raises once the generation is over.
    """
    search = _Search(model, check_cancelled, wanted, into)
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
    return FetchReport(search.header, search.bytes_by_source, tuple(search.problems))


@dataclass(eq=False)
class _Search:
    """What has been found so far."""

    model: str
    check_cancelled: Callable[[], None]
    wanted: Mapping[PieceKey, bool]
    into: PieceQueue
    header: snapshot_file.Header | None = None
    missing: set[PieceKey] = field(init=False)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreachable: set[str] = field(default_factory=set)
    tried: set[tuple[str, str, PieceKey]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = set(self.wanted)

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
            for body, run in self._read_all(runs, pool):
                self.keep(body, run)
                del body  # Its memory may be counted as free while the next one is awaited.

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
                _Candidate(source, file, piece if self.wanted[piece.key] else header.weights(piece))
                for piece in header.pieces
                if piece.key in self.missing - listed
                and (source.name, file, piece.key) not in self.tried
            ]
            listed |= {candidate.piece.key for candidate in wanted}
            self.tried |= {(source.name, file, candidate.piece.key) for candidate in wanted}
            yield wanted

    def _read_all(
        self, runs: Iterable[list[_Candidate]], pool: ThreadPoolExecutor
    ) -> Iterator[tuple[PieceBytes | SourceError, list[_Candidate]]]:
        """Read runs of pieces at the same time, as far as memory for them is free."""
        reads: deque[Future[tuple[PieceBytes | SourceError, list[_Candidate]]]] = deque()
        for run in runs:
            while not self.into.reserve(sum(candidate.held for candidate in run)):
                if reads:
                    yield reads.popleft().result()
                else:
                    self.check_cancelled()
                    self.into.wait(_POLL_S)
            reads.append(pool.submit(self.read, run))
        while reads:
            yield reads.popleft().result()

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
        """Hand on the pieces whose checksums match."""
        if isinstance(body, SourceError):
            self.note(body)
            self.into.free(sum(candidate.held for candidate in candidates))
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
                self.into.free(candidate.held)
                continue
            self.into.put(piece.key, part, candidate.held)
            self.missing.remove(piece.key)
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
