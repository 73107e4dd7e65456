"""Files of samples, which must stay as they are while a job trains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job

_BLOCKS, _BLOCK_BYTES = 16, 2**16
KEEP_DATA = "keep the data as it was while a job trains; start a new job for other data"
"""The cure for data that changed."""


def place_of(job: Job, base: Path, name: str) -> Path:
    """Return where a file that a job names lies: below ``base``, or in a mount of the job.

    A worker of a job with mounts has entered the folder where these are.
    """
    here = Path(name)
    if job.work is not None and job.work.has_mounted(name) and here.exists():
        return here.absolute()
    return base / name


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file as it was when it was opened; a mapped one that shrinks would crash the process."""

    path: Path
    bytes: int
    changed_ns: int
    digest: str
    """Of blocks spread over the file, 1 MiB in all."""

    @property
    def identity(self) -> str:
        """What is equal for the same content on another node."""
        return f"{self.path.name} {self.bytes} {self.digest}"

    def check(self) -> None:
        """Raise ``InputError`` if the file is not as it was."""
        try:
            found = self.path.stat()
        except OSError as error:
            what = f"{self.path} cannot be read any more: {error.strerror or error}"
            raise InputError(Problem(self.path.name, what, KEEP_DATA)) from None
        if (found.st_size, found.st_mtime_ns) != (self.bytes, self.changed_ns):
            what = f"{self.path} was changed while the job trains"
            if found.st_size != self.bytes:
                what += f": it has {found.st_size:,} bytes, and had {self.bytes:,}"
            raise InputError(Problem(self.path.name, what, KEEP_DATA))


def data_file(path: Path) -> DataFile:
    """Look at a file that can be read."""
    found, digest = path.stat(), hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(number * max(found.st_size - _BLOCK_BYTES, 0) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return DataFile(path.absolute(), found.st_size, found.st_mtime_ns, digest.hexdigest())


def identity_of(data: Any) -> str:
    """Return what tells a source's files from others; empty if it has none."""
    return "\n".join(file.identity for file in files_of(data))


def files_of(data: Any) -> tuple[DataFile, ...]:
    """Return the files of a data source or data set that has some."""
    files: tuple[DataFile, ...] = getattr(data, "files", ())
    return files


def check_identity(now: str, before: str) -> None:
    """Raise ``InputError`` if files are not those of the state that training goes on from."""
    if not before or now == before:
        return
    files, were = now.splitlines(), before.splitlines()
    changed = [each for each in files if each not in were]
    missing = [each for each in were if each not in files]
    name, _, _ = _parts((changed or missing or were)[0])
    sizes = [
        next((f"{int(size):,} bytes" for each, size, _ in map(_parts, found) if each == name), "")
        for found in (files, were)
    ]
    what = "is not the file that the job was trained on so far"
    if not sizes[0]:
        what = "is a file that the job was trained on so far, and is none of its data now"
    elif sizes[0] != sizes[1]:
        what += f": it has {sizes[0]}, and had {sizes[1] or 'another name'}"
    raise InputError(Problem(name, what, KEEP_DATA))


def _parts(identity: str) -> tuple[str, str, str]:
    name, size, digest = identity.rsplit(" ", 2)
    return name, size, digest
