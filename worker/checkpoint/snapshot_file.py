"""Snapshots as files: how they are laid out, sealed, found, read a piece at a time, and judged.

A file holds what one rank keeps of a job's state at one point. It begins with a short prelude and
a header in JSON, and its *pieces* follow. Layers are cut into ``atoms`` + 1 pieces each: one for
every atom, and a last one for what is not cut; after the last layer comes one more that stands for
the tensors that layers share. A piece's bytes are its fp32 (or fp64) weights, then its first
moment, then its second. The prelude is written last: a file that has none is not sealed, and
nobody reads it.

Workers write these files and agents look after them, so nothing here loads torch. The same format
serves for snapshots in memory, for copies on other nodes and for objects in a durable store.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from worker.layout.rank_layout import TIED
from worker.types import LogicalTensor

FORMAT = 1
SUFFIX = ".snap"
PRELUDE = struct.Struct("<8sQ16s")
"""The magic, how long the header is, and its checksum."""
MAGIC = b"SAILOR\x01\n"
ALIGN = 4096
"""The body begins at a multiple of this; pieces at a multiple of 64."""
ANY_NODE = ""
"""As a buddy: no node of the plan is fit, and any other that stands by is."""
_PIECE_ALIGN = 64
_SPARE_BYTES = 512
"""For numbers of the header that have grown by the time that it is written."""


class SnapshotError(ValueError):
    """A file is no sealed snapshot, or not as it was written; the message names it."""


class NoRoomError(OSError):
    """A folder's file system has no room for a snapshot."""

    needed_bytes: int = 0
    """So many must be free there."""

    @classmethod
    def of(cls, number: int | None, text: str, folder: Path, needed_bytes: int) -> NoRoomError:
        """Say it with the number; ``number`` is the kernel's."""
        error = cls(number, text, str(folder))
        error.needed_bytes = needed_bytes
        return error


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """What a job has come to besides its tensors."""

    step: int
    updates: int
    scale: float
    good_steps: int
    """Since the loss scale changed."""
    sample_hash: str
    samples: int
    label_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of one layer, and where in the file it stands."""

    layer: int
    piece: int
    offset: int
    bytes: int
    checksum: str = ""
    """Of its bytes, in hexadecimal."""
    is_written: bool = False
    """When the point is made durable, it is this file's copy that is brought there."""
    buddy: str | None = None
    """One loss would take it: a copy belongs on that node, or on ``ANY_NODE``."""

    @property
    def key(self) -> tuple[int, int]:
        return self.layer, self.piece


@dataclass(frozen=True, slots=True)
class Header:
    """All that a file says of itself."""

    job: str
    generation: int
    step: int
    """So many steps are done, the last of them by ``generation``."""
    term: int
    rank: int
    node: str
    """Of the writer, whoever keeps this copy."""
    atoms: int
    layers: int
    """With one more for what layers share."""
    dtype: str
    moments: int
    model: str
    """The fingerprint of the tensors: another model cannot be filled from these bytes."""
    persist: bool
    """This point is to be made durable."""
    progress: SavedProgress
    pieces: tuple[Piece, ...]
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        return file_name(self.rank)

    @property
    def total_bytes(self) -> int:
        """Of the whole file."""
        return max((piece.offset + piece.bytes for piece in self.pieces), default=ALIGN)


# ---- names --------------------------------------------------------------------------------------


def point_folder(memory: Path, job: str, *, generation: int, step: int) -> Path:
    """Where the files of one point stand in a node's memory folder."""
    return memory / job / f"{generation}-{step}"


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"{rank}{SUFFIX}"


def part_name(generation: int, rank: int, pid: int, number: int) -> str:
    """What a file is called that a worker is writing; it stands in the job's folder."""
    return f".{generation}.{rank}.{pid}.{number}.part"


def fingerprint(
    tables: Iterable[Iterable[LogicalTensor]], *, atoms: int, dtype: str, moments: int
) -> str:
    """Name the tensors of a job: equal for two jobs whose states can stand for each other."""
    told = {
        "tensors": [
            [(spec.name, spec.shape, spec.split_dim, spec.tied_name) for spec in table]
            for table in tables
        ],
        "atoms": atoms,
        "dtype": dtype,
        "moments": moments,
    }
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def layer_number(layer: int, *, layers: int) -> int:
    """A layer's number in files, where what layers share comes last; ``layers`` without it."""
    return layers if layer == TIED else layer


def layer_from_number(number: int, *, layers: int) -> int:
    """The layer of that number."""
    return TIED if number == layers else number


# ---- the bytes of a header ----------------------------------------------------------------------


def checksum(data: bytes | bytearray | memoryview) -> str:
    """The checksum of some bytes, as headers hold it."""
    return xxhash.xxh3_128_hexdigest(data)


def with_offsets(header: Header) -> Header:
    """The header with every piece at its place, in their order; sizes are known, sums not yet."""
    widest = [replace(p, offset=2**48, checksum="0" * 32) for p in header.pieces]
    room = len(_encode(replace(header, pieces=tuple(widest)))) + PRELUDE.size + _SPARE_BYTES
    offset = -(-room // ALIGN) * ALIGN
    placed = []
    for piece in header.pieces:
        placed.append(replace(piece, offset=offset))
        offset += -(-piece.bytes // _PIECE_ALIGN) * _PIECE_ALIGN
    return replace(header, pieces=tuple(placed))


def head_bytes(header: Header) -> bytes:
    """The prelude and the header as they stand at the beginning of a sealed file."""
    text = _encode(header)
    start = min((piece.offset for piece in header.pieces), default=ALIGN)
    assert PRELUDE.size + len(text) <= start, "the header has grown into the body"
    return PRELUDE.pack(MAGIC, len(text), xxhash.xxh3_128_digest(text)) + text


def head_checksum(head: bytes) -> str:
    """The checksum of a header, by which the sums of all its pieces are known too."""
    _, _, digest = PRELUDE.unpack_from(head)
    return bytes(digest).hex()


def head_length(data: bytes, *, name: str) -> int:
    """How many bytes prelude and header take, told from the prelude."""
    if len(data) < PRELUDE.size:
        raise SnapshotError(f"{name} is cut short")
    magic, length, _ = PRELUDE.unpack_from(data)
    if magic == bytes(len(MAGIC)):
        raise SnapshotError(f"{name} is not sealed: whoever wrote it did not come to the end")
    if magic != MAGIC:
        raise SnapshotError(f"{name} is no snapshot, or of another version of it")
    return PRELUDE.size + int(length)


def parse_head(data: bytes, *, name: str) -> Header:
    """Read prelude and header; whatever is wrong is a ``SnapshotError`` that names the file."""
    end = head_length(data, name=name)
    if len(data) < end:
        raise SnapshotError(f"{name} is cut short")
    text = data[PRELUDE.size : end]
    if xxhash.xxh3_128_digest(text) != PRELUDE.unpack_from(data)[2]:
        raise SnapshotError(f"{name} is damaged: the checksum of its header does not fit")
    return header_from(json.loads(text), name=name)


def header_from(document: Any, *, name: str) -> Header:
    """Read a header from its JSON."""
    try:
        header = Header(**_with_parts(document))
    except (TypeError, KeyError, ValueError) as error:
        raise SnapshotError(f"{name} has a header that is not understood ({error})") from None
    if header.format != FORMAT:
        raise SnapshotError(f"{name} has format {header.format}, and only {FORMAT} is known here")
    return header


def header_document(header: Header) -> dict[str, Any]:
    """The JSON of a header; pieces are rows, since there are many."""
    document = {name: getattr(header, name) for name in _FIELDS}
    pieces = [[getattr(piece, name) for name in _PIECE_FIELDS] for piece in header.pieces]
    return {**document, "progress": asdict(header.progress), "pieces": pieces}


_FIELDS = tuple(name for name in Header.__slots__ if name not in ("progress", "pieces"))
_PIECE_FIELDS = tuple(Piece.__slots__)


def _with_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    pieces = tuple(Piece(*row) for row in document["pieces"])
    return {**document, "progress": SavedProgress(**document["progress"]), "pieces": pieces}


def _encode(header: Header) -> bytes:
    return json.dumps(header_document(header), separators=(",", ":")).encode()


# ---- reading ------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Read the header of a sealed file."""
    name = str(path)
    with path.open("rb") as file:
        prelude = file.read(PRELUDE.size)
        rest = file.read(head_length(prelude, name=name) - PRELUDE.size)
        header = parse_head(prelude + rest, name=name)
        if os.fstat(file.fileno()).st_size < header.total_bytes:
            raise SnapshotError(f"{name} is cut short")
    return header


def read_head(path: Path) -> bytes:
    """The bytes of prelude and header of a sealed file."""
    with path.open("rb") as file:
        prelude = file.read(PRELUDE.size)
        return prelude + file.read(head_length(prelude, name=str(path)) - PRELUDE.size)


def read_piece(path: Path, piece: Piece) -> bytes:
    """Read one piece and see that it is as it was written."""
    with path.open("rb") as file:
        data = os.pread(file.fileno(), piece.bytes, piece.offset)
    check_piece(data, piece, name=str(path))
    return data


def check_piece(data: bytes | bytearray | memoryview, piece: Piece, *, name: str) -> None:
    """Refuse bytes that are not those that were sealed; the message says which they are."""
    where = f"{name}: piece {piece.piece} of layer {piece.layer}"
    if len(data) != piece.bytes:
        raise SnapshotError(f"{where} has {len(data)} bytes instead of {piece.bytes}")
    if checksum(data) != piece.checksum:
        raise SnapshotError(f"{where} is damaged: its checksum does not fit")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A sealed file."""

    path: Path
    header: Header


def sealed_files(folder: Path) -> Iterator[SealedFile]:
    """All sealed files of one point; what is half-written, damaged or in the way is passed over."""
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
    """All points in a node's memory folder: job, generation, step, folder."""
    for folder in sorted(memory.glob("*/*-*")):
        generation, _, step = folder.name.partition("-")
        if generation.isdecimal() and step.isdecimal() and folder.is_dir():
            yield folder.parent.name, int(generation), int(step), folder


def unfinished_files(memory: Path) -> Iterator[tuple[int, Path]]:
    """Files that are being written, or were: the number of the process that began them."""
    for path in sorted(memory.glob("*/.*.part")):
        parts = path.name.split(".")
        if len(parts) == 6 and parts[3].isdecimal():
            yield int(parts[3]), path


# ---- writing ------------------------------------------------------------------------------------


def create(path: Path, size: int) -> int:
    """Make a file that has all of its memory already, and return it open.

    A file in memory that grows while it is written kills the writer when the memory is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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


def no_room(folder: Path, size: int) -> str:
    """Say how much is missing."""
    free = free_bytes(folder)
    return f"{in_mib(size)} are needed for a snapshot and {in_mib(free)} are free"


def in_mib(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:,.1f} MiB"


def free_bytes(folder: Path) -> int:
    """How much may still be written to a folder, or to where it is to be made.

    What is kept in memory takes no more than the machine has left, whatever its limit says.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    left = os.statvfs(folder)
    free = left.f_bavail * left.f_frsize
    if not _is_in_memory(folder):
        return free
    available = _memory_available()
    return available if left.f_blocks == 0 else min(free, available)


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == name:
            return system.split()[0] in {"tmpfs", "ramfs"}
    return False


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return sys.maxsize


def partial_header(header: Header, keys: Iterable[tuple[int, int]]) -> Header:
    """The header of a file with some of the pieces, under the writer's name."""
    wanted = set(keys)
    return with_offsets(replace(header, pieces=tuple(p for p in header.pieces if p.key in wanted)))


def seal(file: int, header: Header) -> None:
    """Write header and prelude, after which the file counts; its pieces are all there."""
    head = head_bytes(header)
    os.pwrite(file, head[PRELUDE.size :], PRELUDE.size)
    os.pwrite(file, head[: PRELUDE.size], 0)


def unseal(file: int) -> None:
    """From now on the file does not count."""
    os.pwrite(file, bytes(PRELUDE.size), 0)


def write_copy(folder: Path, header: Header, bodies: Mapping[tuple[int, int], bytes]) -> Path:
    """Write a sealed file with these pieces of another one, all of it or nothing."""
    copied = partial_header(header, bodies)
    early = folder.parent / part_name(header.generation, header.rank, os.getpid(), header.step)
    early.unlink(missing_ok=True)
    file = create(early, copied.total_bytes)
    try:
        for piece in copied.pieces:
            check_piece(bodies[piece.key], piece, name=copied.file_name)
            os.pwrite(file, bodies[piece.key], piece.offset)
        seal(file, copied)
        folder.mkdir(exist_ok=True)
        return early.rename(folder / copied.file_name)
    finally:
        os.close(file)
        early.unlink(missing_ok=True)


# ---- telling others -----------------------------------------------------------------------------


def listing(found: Iterable[SealedFile]) -> bytes:
    """What a node answers to whoever asks which files it has of a point."""
    rows = [{"file": each.path.name, "header": header_document(each.header)} for each in found]
    return json.dumps(rows).encode()


def listing_from(data: bytes, *, name: str) -> dict[str, Header]:
    """Read such an answer: headers by the names of their files."""
    try:
        rows = json.loads(data)
        return {
            str(row["file"]): header_from(row["header"], name=f"{name}/{row['file']}")
            for row in rows
        }
    except (TypeError, KeyError, ValueError) as error:
        raise SnapshotError(f"{name} answered what is not understood ({error})") from None
