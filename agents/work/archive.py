"""The archive of a work folder: a compressed tar file, the same for the same content.

It holds regular files and links that stay inside the folder, and no times, owners or folders of
their own. ``unpack`` refuses anything else, since others may have made the archive.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from agents.work.package import BYTES_MAX

FILES_MAX = 20_000
_HEADERS_MAX = FILES_MAX * 4096


class ArchiveError(Exception):
    """The archive holds what no work folder has; the message says what."""


def pack(root: Path, names: Iterable[str], out: IO[bytes]) -> None:
    """Pack the files and links of these names below ``root``."""
    with (
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(names):
            path = root / name
            info = tarfile.TarInfo(name)
            if path.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(info)
                continue
            content = path.read_bytes()
            info.size = len(content)
            info.mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            archive.addfile(info, io.BytesIO(content))


def leads_outside(name: str, target: str) -> bool:
    """Return whether a link of this name leads out of its folder."""
    end = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return os.path.isabs(target) or end == ".." or end.startswith("../")


def link_on_the_way(name: str, target: str, links: Collection[str]) -> str | None:
    """Return the link, of those named, through which a link of this name leads."""
    place: list[str] = []
    for each in (*PurePosixPath(name).parent.parts, *PurePosixPath(target).parts[:-1]):
        place = place[:-1] if each == ".." else [*place, each]
        if "/".join(place) in links:
            return "/".join(place)
    return None


def unpack(path: Path, target: Path) -> None:
    """Unpack the archive in a file into a new folder; raises ``ArchiveError``."""
    links: dict[str, str] = {}
    total = count = 0
    target.mkdir(parents=True)
    try:
        with (
            gzip.open(path) as packed,
            tarfile.open(fileobj=_Bounded(packed), mode="r|") as archive,
        ):
            for info in archive:
                total, count = total + info.size, count + 1
                _check(info, total, count)
                if info.issym():
                    links[str(PurePosixPath(info.name))] = info.linkname
                    continue
                content = archive.extractfile(info)
                assert content is not None, "it is a regular file"
                _write(target / info.name, content.read(), info.mode)
        _link(target, links)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ArchiveError(f"is damaged: {error}") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ArchiveError(f"holds a name twice: {error.filename}") from None


def _link(target: Path, links: Mapping[str, str]) -> None:
    """Make the links: last, so that no file is written through one."""
    for name, leads_to in links.items():
        if link_on_the_way(name, leads_to, links) is not None:
            raise ArchiveError(f"holds a link that leads through another: {name!r}")
    for name, leads_to in links.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(leads_to)


def _check(info: tarfile.TarInfo, total: int, count: int) -> None:
    place = PurePosixPath(info.name)
    if place.is_absolute() or not place.parts or ".." in place.parts or "\0" in info.name:
        raise ArchiveError(f"holds a name outside its folder: {info.name!r}")
    if not (info.isreg() or info.issym()):
        raise ArchiveError(f"holds what is neither file nor link: {info.name!r}")
    if info.issym() and leads_outside(info.name, info.linkname):
        raise ArchiveError(f"holds a link that leads outside: {info.name!r}")
    if total > BYTES_MAX:
        raise ArchiveError(f"holds more than {BYTES_MAX} bytes")
    if count > FILES_MAX:
        raise ArchiveError(f"holds more than {FILES_MAX} files")


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
    path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)


class _Bounded(io.RawIOBase):
    """A stream of limited length: some bytes of a compressed file may stand for many."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        super().__init__()
        self.stream, self.left = stream, BYTES_MAX + _HEADERS_MAX

    def read(self, size: int = -1) -> bytes:
        read = self.stream.read(size)
        self.left -= len(read)
        if self.left < 0:
            raise ArchiveError(f"holds more than {BYTES_MAX} bytes")
        return read
