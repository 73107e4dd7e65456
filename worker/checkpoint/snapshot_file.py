"""The snapshot file format: layout, sealing, listing and checked reads.

A file holds what one rank keeps of a job's state at one point (generation and step). It starts with
a short prelude and a JSON header, followed by *pieces*. Each layer has ``atoms`` + 1 pieces: one
for every atom, and a last one for its unsplit tensors; an extra layer at the end holds the tensors
that layers share. A piece's bytes are its fp32 (or fp64) weights, then its first moment, then its
second. The prelude is written last: a file without one is not sealed and is ignored.

Workers write these files and agents manage them, so this module does not load torch. Snapshots in
memory, replicas on other nodes and objects in durable storage share this format.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, get_args, get_type_hints

import xxhash

from worker.checkpoint.free_space import free_bytes, in_mib
from worker.layout.rank_layout import TIED
from worker.plain_file import open_plain
from worker.types import LogicalTensor

FORMAT = 1
SUFFIX = ".snap"
LINKS = ".held"
"""The folder in a node's snapshot memory with second names of the files that wait for upload."""
PRELUDE = struct.Struct("<8sQ16s")
"""Magic, header length and header checksum."""
MAGIC = b"SAILOR\x01\n"
ALIGN = 4096
"""The body starts at a multiple of 4,096 bytes; pieces at a multiple of 64."""
ANY_NODE = ""
"""The buddy of a piece for which no node of the plan qualifies: any other registered node."""
_PIECE_ALIGN = 64
_CHUNK_BYTES = 1 << 20
HEAD_BYTES_MAX = 1 << 28
"""Far beyond any header: a longer one is a damaged length, which no reader may allocate."""
UNKNOWN = "0" * 32
"""A checksum that is yet to be computed."""
_SPARE_BYTES = 512
"""Spare bytes for numbers in the header that grow until it is written."""


class SnapshotError(ValueError):
    """A file is not a sealed snapshot, or is damaged; the message names it."""


class NoRoomError(OSError):
    """A folder's file system has no room for a snapshot."""

    needed_bytes: int = 0
    """Bytes that must be free there."""

    @classmethod
    def of(cls, number: int | None, text: str, folder: Path, needed_bytes: int) -> NoRoomError:
        """Build the error with the needed bytes; ``number`` is the errno."""
        error = cls(number, text, str(folder))
        error.needed_bytes = needed_bytes
        return error


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """The state of a job besides its tensors."""

    step: int
    updates: int
    scale: float
    good_steps: int
    """Steps since the loss scale changed."""
    sample_hash: str
    samples: int
    label_tokens: int
    nonfinite: int = 0
    """How many steps in a row were not finite; absent from older files, when none was skipped."""
    data: str = ""
    """Which files the samples are from; absent from older files."""
    order: str = field(default="", compare=False)
    """What the order of a script's samples depends on; absent from older files, which are no others
    for that."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of one layer, and its position in the file."""

    layer: int
    piece: int
    offset: int
    bytes: int
    checksum: str = ""
    """Checksum of its bytes, in hexadecimal."""
    is_written: bool = False
    """Whether this file's copy is uploaded when the point is made durable."""
    buddy: str | None = None
    """The node, or ``ANY_NODE``, that keeps a replica, if one loss would take the piece."""
    weights_checksum: str = ""
    """Checksum of its weights alone, if ranks may need them without moments."""

    @property
    def key(self) -> tuple[int, int]:
        return self.layer, self.piece


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a snapshot file."""

    job: str
    generation: int
    step: int
    """The number of completed steps; ``generation`` did the last one."""
    term: int
    rank: int
    node: str
    """The node of the writer, whichever node keeps this copy."""
    atoms: int
    layers: int
    """Including the extra one for shared tensors."""
    dtype: str
    moments: int
    model: str
    """The fingerprint of the tensors; a model with another one cannot load this file."""
    persist: bool
    """Whether this point is to be made durable."""
    progress: SavedProgress
    pieces: tuple[Piece, ...]
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        return file_name(self.rank)

    @property
    def total_bytes(self) -> int:
        """The size of the whole file."""
        return max((piece.offset + piece.bytes for piece in self.pieces), default=ALIGN)

    def weights(self, piece: Piece) -> Piece:
        """Return a piece without its moments, or all of it if only that can be checked."""
        if not piece.weights_checksum:
            return piece
        size = piece.bytes // (1 + self.moments)
        return replace(piece, bytes=size, checksum=piece.weights_checksum)


# ---- names --------------------------------------------------------------------------------------


def point_folder(memory: Path, job: str, *, generation: int, step: int) -> Path:
    """Return the folder of one point's files in a node's snapshot memory."""
    return memory / job / f"{generation}-{step}"


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"{rank}{SUFFIX}"


def part_name(generation: int, rank: int, pid: int, number: int) -> str:
    """Return the name of a file that a worker is writing, in the job's folder."""
    return f".{generation}.{rank}.{pid}.{number}.part"


def fingerprint(
    tables: Iterable[Iterable[LogicalTensor]], *, atoms: int, dtype: str, moments: int
) -> str:
    """Return a fingerprint of a job's tensors; equal ones can load each other's states."""
    content = {
        "tensors": [
            [(spec.name, spec.shape, spec.split_dim, spec.tied_name) for spec in table]
            for table in tables
        ],
        "atoms": atoms,
        "dtype": dtype,
        "moments": moments,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def layer_number(layer: int, *, layers: int) -> int:
    """Return a layer's number in files, where shared tensors come last; ``layers`` without them."""
    return layers if layer == TIED else layer


def layer_from_number(number: int, *, layers: int) -> int:
    """Return the layer with that number."""
    return TIED if number == layers else number


# ---- header bytes --------------------------------------------------------------------------------


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of some bytes, as in headers."""
    return xxhash.xxh3_128_hexdigest(data)


def with_offsets(header: Header) -> Header:
    """Return the header with the offset of every piece.

    Sizes must be set; checksums of pieces need not, but those of weights must be ``UNKNOWN``.
    """
    widest = [replace(p, offset=2**48, checksum=UNKNOWN) for p in header.pieces]
    room = len(_encode(replace(header, pieces=tuple(widest)))) + PRELUDE.size + _SPARE_BYTES
    offset = -(-room // ALIGN) * ALIGN
    placed = []
    for piece in header.pieces:
        placed.append(replace(piece, offset=offset))
        offset += -(-piece.bytes // _PIECE_ALIGN) * _PIECE_ALIGN
    return replace(header, pieces=tuple(placed))


def head_bytes(header: Header) -> bytes:
    """Return prelude and header as the first bytes of a sealed file."""
    text = _encode(header)
    start = min((piece.offset for piece in header.pieces), default=ALIGN)
    assert PRELUDE.size + len(text) <= start, "the header overlaps the body"
    assert len(text) <= HEAD_BYTES_MAX, "no reader takes a header of this length"
    return PRELUDE.pack(MAGIC, len(text), xxhash.xxh3_128_digest(text)) + text


def head_checksum(head: bytes | bytearray) -> str:
    """Return the checksum of a header, which covers the checksums of all its pieces."""
    _, _, digest = PRELUDE.unpack_from(head)
    return bytes(digest).hex()


def head_length(data: bytes | bytearray, *, name: str) -> int:
    """Return the length of prelude and header, as the prelude states it."""
    if len(data) < PRELUDE.size:
        raise SnapshotError(f"{name} is truncated")
    magic, length, _ = PRELUDE.unpack_from(data)
    if magic == bytes(len(MAGIC)):
        raise SnapshotError(f"{name} is not sealed: its writer did not finish")
    if magic != MAGIC:
        raise SnapshotError(f"{name} is not a snapshot, or has another format version")
    if length > HEAD_BYTES_MAX:
        raise SnapshotError(f"{name} is damaged: its header cannot have {length:,} bytes")
    return PRELUDE.size + int(length)


def parse_head(data: bytes | bytearray, *, name: str) -> Header:
    """Read prelude and header; raise ``SnapshotError`` with the file's name if they are damaged."""
    end = head_length(data, name=name)
    if len(data) < end:
        raise SnapshotError(f"{name} is truncated")
    text = data[PRELUDE.size : end]
    if xxhash.xxh3_128_digest(text) != PRELUDE.unpack_from(data)[2]:
        raise SnapshotError(f"{name} is damaged: the checksum of its header does not match")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{name} has an invalid header ({error})") from None
    return header_from(document, name=name)


def header_from(document: Any, *, name: str) -> Header:
    """Read a header from its JSON; what a newer version added is passed over."""
    try:
        pieces = tuple(Piece(*row[: len(_PIECE_FIELDS)]) for row in document["pieces"])
        progress = progress_of(document["progress"])
        flat = {name: each for name, each in document.items() if name in _FIELDS}
        header = Header(**flat, progress=progress, pieces=pieces)
        _check_types([header])
        _check_types([progress])
        _check_types(pieces)
        if len({piece.key for piece in pieces}) < len(pieces):
            raise ValueError("it names a piece twice")
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise SnapshotError(f"{name} has an invalid header ({error})") from None
    if header.format != FORMAT:
        raise SnapshotError(f"{name} has format {header.format}; only {FORMAT} is supported")
    return header


def progress_of(document: Mapping[str, Any]) -> SavedProgress:
    """Return a saved progress; what a newer version added is passed over."""
    return SavedProgress(**{k: v for k, v in document.items() if k in _PROGRESS_FIELDS})


def header_document(header: Header) -> dict[str, Any]:
    """Return the JSON of a header; pieces are rows, since there are many."""
    document = {name: getattr(header, name) for name in _FIELDS}
    rows = [[getattr(piece, name) for name in _PIECE_FIELDS] for piece in header.pieces]
    rows = [row if row[-1] else row[:-1] for row in rows]  # Versions without the field do the same.
    return {**document, "progress": asdict(header.progress), "pieces": rows}


_FIELDS = tuple(name for name in Header.__slots__ if name not in ("progress", "pieces"))
_PIECE_FIELDS = tuple(Piece.__slots__)
_PROGRESS_FIELDS = tuple(SavedProgress.__slots__)
_KINDS: dict[type, dict[str, Any]] = {
    kind: {
        name: (int, float) if hint is float else get_args(hint) or hint
        for name, hint in get_type_hints(kind).items()
        if name != "pieces"
    }
    for kind in (Header, SavedProgress, Piece)
}


def _check_types(records: Sequence[Header | SavedProgress | Piece]) -> None:
    """Raise ``TypeError`` for a field of another type: a script may have written the file."""
    for name, kind in _KINDS[type(records[0])].items() if records else ():
        for record in records:
            value = getattr(record, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r:.40}")


def _encode(header: Header) -> bytes:
    return json.dumps(header_document(header), separators=(",", ":")).encode()


# ---- reading ------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Read the header of a sealed file."""
    header = parse_head(read_head(path), name=str(path))
    if path.stat().st_size < header.total_bytes:
        raise SnapshotError(f"{path} is truncated")
    return header


def read_head(path: Path) -> bytes:
    """Read the bytes of prelude and header of a sealed file."""
    with open_plain(path) as file:
        prelude = file.read(PRELUDE.size)
        return prelude + file.read(head_length(prelude, name=str(path)) - PRELUDE.size)


def read_piece(path: Path, piece: Piece) -> bytes:
    """Read one piece and verify its checksum."""
    with open_plain(path) as file:
        return b"".join(piece_chunks(partial(os.pread, file.fileno()), piece, name=str(path)))


def piece_chunks(read: Callable[[int, int], bytes], piece: Piece, *, name: str) -> Iterator[bytes]:
    """Yield the bytes of one piece; at its end ``SnapshotError`` if they are not the sealed ones.

    ``read`` returns so many bytes of the file from an offset on, or fewer: Linux returns less than
    2 GiB at once, whatever is asked for.
    """
    total, done = xxhash.xxh3_128(), 0
    while done < piece.bytes:
        data = read(min(_CHUNK_BYTES, piece.bytes - done), piece.offset + done)
        if not data:
            break
        total.update(data)
        done += len(data)
        yield data
    check_digest(done, total.hexdigest(), piece, name=name)


def check_piece(data: bytes | bytearray | memoryview, piece: Piece, *, name: str) -> None:
    """Raise ``SnapshotError`` if the bytes are not those of the sealed piece."""
    check_digest(len(data), checksum(data), piece, name=name)


def check_digest(size: int, digest: str, piece: Piece, *, name: str) -> None:
    """Raise ``SnapshotError`` if size or checksum are not those of the sealed piece."""
    where = f"{name}: piece {piece.piece} of layer {piece.layer}"
    if size != piece.bytes:
        raise SnapshotError(f"{where} has {size} bytes instead of {piece.bytes}")
    if digest != piece.checksum:
        raise SnapshotError(f"{where} is damaged: its checksum does not match")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A sealed file and its header."""

    path: Path
    header: Header


def sealed_files(folder: Path) -> Iterator[SealedFile]:
    """Yield all sealed files of one point; skip unfinished, damaged and foreign ones."""
    try:
        paths = sorted(folder.glob(f"*{SUFFIX}"))
    except OSError:
        return
    for path in paths:
        try:
            yield SealedFile(path, read_header(path))
        except (OSError, SnapshotError):
            continue


def point_folders(memory: Path) -> Iterator[tuple[str, int, int, Path]]:
    """Yield all points in a node's snapshot memory: job, generation, step, folder."""
    # Unlike Path.glob, it passes over a folder that is deleted meanwhile.
    for folder in map(memory.joinpath, sorted(glob("*/*-*", root_dir=memory))):
        point = point_of(folder.name)
        if point is not None and folder.is_dir():
            yield folder.parent.name, *point, folder


def point_of(folder: str) -> tuple[int, int] | None:
    """Return generation and step of a point's folder; ``None``: it is another folder."""
    generation, _, step = folder.partition("-")
    is_one = generation.isdecimal() and step.isdecimal()
    return (int(generation), int(step)) if is_one else None


def unfinished_files(memory: Path) -> Iterator[tuple[int, Path]]:
    """Yield unfinished files with the process id of their writer."""
    for path in sorted(memory.glob("*/.*.part")):
        parts = path.name.split(".")
        if len(parts) == 6 and parts[3].isdecimal():
            yield int(parts[3]), path


# ---- writing ------------------------------------------------------------------------------------


def create(path: Path, size: int) -> int:
    """Create a file with all of its space allocated and return its descriptor.

    A file in tmpfs that grows while it is written kills the writer when memory is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readable by the group: an agent and workers of another user share the folder.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        os.close(file)
        path.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text = no_room(path.parent, size)
            raise NoRoomError.of(error.errno, text, path.parent, size) from None
        raise
    return file


def make_folder(path: Path) -> None:
    """Make a folder in which the agent and workers of another user may rename and delete."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(0o770)


def no_room(folder: Path, size: int) -> str:
    """Return a message with the needed and the free bytes."""
    free = free_bytes(folder)
    return f"{in_mib(size)} are needed for snapshots, and {in_mib(free)} are free"


def partial_header(header: Header, keys: Iterable[tuple[int, int]]) -> Header:
    """Return the header of a file with some of the pieces, under the writer's name."""
    wanted = set(keys)
    return with_offsets(replace(header, pieces=tuple(p for p in header.pieces if p.key in wanted)))


def seal(file: int, header: Header) -> None:
    """Write header and prelude, which makes the file valid; its pieces must be complete."""
    head = head_bytes(header)
    os.pwrite(file, head[PRELUDE.size :], PRELUDE.size)
    os.pwrite(file, head[: PRELUDE.size], 0)


def unseal(file: int) -> None:
    """Erase the prelude, which makes the file invalid."""
    os.pwrite(file, bytes(PRELUDE.size), 0)


# ---- listings ------------------------------------------------------------------------------------


def listing(found: Mapping[str, Header]) -> bytes:
    """Return a source's list of its files of a point, as JSON."""
    rows = [{"file": name, "header": header_document(header)} for name, header in found.items()]
    return json.dumps(rows).encode()


def listing_from(data: bytes, *, name: str) -> dict[str, Header]:
    """Read such a list: headers by file name."""
    try:
        rows = json.loads(data)
        return {
            str(row["file"]): header_from(row["header"], name=f"{name}/{row['file']}")
            for row in rows
        }
    except (TypeError, KeyError, ValueError) as error:
        raise SnapshotError(f"{name} sent an invalid answer ({error})") from None
