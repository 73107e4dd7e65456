"""Checkpoint storage: any folder or object store that fsspec supports.

Every error of a backend becomes a ``StorageError`` that says what failed, where, and why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from agents.object_store import ObjectContent, whole, write_once
from simulator.documents.problems import InputError, Problem

T = TypeVar("T")

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
CREDENTIALS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
}
CAUSES = {
    errno.ENOSPC: "the storage is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
}
GONE = (errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""What a mounted file system says whose server does not answer."""
REFUSED = re.compile(
    r"credential|unauthorized|forbidden|access ?denied|anonymous|\b40[13]\b", re.IGNORECASE
)


class StorageError(Exception):
    """An operation failed; the message says which, where and why."""


class Missing(StorageError):  # noqa: N818 - an expected answer, not a failure of ours
    """There is no object of that name."""


class Away(StorageError):  # noqa: N818 - an expected answer, not a failure of ours
    """The storage is unreachable or refuses access; its contents are unknown."""


class Damaged(StorageError):  # noqa: N818 - as above
    """The storage cannot read an object: its medium is damaged there."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object, by its name relative to the listed folder."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage for checkpoints. Operations block: call them in a thread."""

    uri: str
    files: Any
    root: str

    def uri_of(self, name: str) -> str:
        return f"{self.uri.rstrip('/')}/{name}"

    def read(self, name: str, first: int | None = None, end: int | None = None) -> bytes:
        """Read an object, or a range of its bytes; fewer at its end."""
        path = self._path(name)
        data = self._try(name, "read", lambda: self.files.cat_file(path, start=first, end=end))
        assert isinstance(data, bytes)
        return data

    def size(self, name: str) -> int:
        return int(self._try(name, "read", lambda: self.files.size(self._path(name))))

    def entries(self, folder: str) -> list[ListedObject]:
        """All objects below a folder; none if it does not exist."""
        base = self._path(folder)
        try:
            if isinstance(self.files, LocalFileSystem):  # ``find`` hides errors.
                self._try(folder, "listed", lambda: os.scandir(base).close())
            self.files.invalidate_cache()
            found = self._try(folder, "listed", lambda: self.files.find(base, detail=True))
        except Missing:
            return []
        prefix = self.files._strip_protocol(base).rstrip("/") + "/"
        return sorted(
            (ListedObject(path.removeprefix(prefix), int(about["size"] or 0))
             for path, about in found.items() if path.startswith(prefix)),
            key=lambda entry: entry.name,
        )  # fmt: skip

    def make_root(self) -> None:
        """Create the root folder; an object store needs none."""
        if isinstance(self.files, LocalFileSystem):
            path = Path(self.root)
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = os.strerror(error.errno or errno.EIO)
                raise StorageError(f"{self.uri} cannot be created: {why}") from None

    def write(self, name: str, data: bytes) -> None:
        """Write an object atomically and durably; an existing object is never replaced."""
        self.write_content(name, whole(data))

    def write_content(self, name: str, content: ObjectContent) -> None:
        """Do the same with a content that need not be in memory."""
        path = self._path(name)
        self._try(name, "written", lambda: write_once(self.files, path, content))

    def delete(self, name: str) -> None:
        """Delete an object; no error if it does not exist."""
        path = self._path(name)
        with contextlib.suppress(Missing):
            self._try(name, "deleted", lambda: self.files.rm_file(path))
        if isinstance(self.files, LocalFileSystem):
            # Folders are not objects; remove empty ones.
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _try(self, name: str, what: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception as error:
            raise _convert(self.uri_of(name), what, self.uri, error) from None


def open_storage(uri: str) -> Storage:
    """Open a storage by its URI; raises ``InputError`` for an invalid one."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        if not PurePosixPath(uri).is_absolute():
            what = f"{uri!r} is a relative path, which is a different folder on each machine"
            raise InputError(Problem("checkpoint: uri", what, "give gs://, s3:// or file:///..."))
        uri = f"file://{uri}"
    try:
        files, root = fsspec.core.url_to_fs(uri)
    except ImportError:
        package = PACKAGES.get(scheme, "the package for it")
        what = f"{uri} needs {package}, which is not installed"
        raise InputError(Problem("checkpoint: uri", what, f"pip install {package}")) from None
    except ValueError as error:
        cure = "give gs://, s3:// or file:///..."
        raise InputError(Problem("checkpoint: uri", f"{uri}: {error}", cure)) from None
    except Exception as error:
        raise _convert(uri, "opened", uri, error) from None
    return Storage(uri, files, root.rstrip("/"))


def _convert(place: str, what: str, uri: str, error: Exception) -> StorageError:
    """Convert an error of a backend."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        return Missing(f"{place} does not exist")
    if number in CAUSES:
        return StorageError(f"{place} cannot be {what}: {CAUSES[number]}")
    scheme = uri.partition("://")[0]
    text = f"{type(error).__name__}: {error}"
    if scheme in PACKAGES and (isinstance(error, PermissionError) or REFUSED.search(text)):
        cure = CREDENTIALS.get({"gcs": "gs", "s3a": "s3"}.get(scheme, scheme), "see its documents")
        return Away(f"{place} cannot be {what}: the credentials are missing or refused; {cure}")
    if isinstance(error, PermissionError):
        return StorageError(f"{place} cannot be {what}: the permission is missing")
    if isinstance(error, OSError) and number is not None and scheme == "file":
        kind = Away if number in GONE else Damaged if number == errno.EIO else StorageError
        return kind(f"{place} cannot be {what}: {os.strerror(number)}")
    return Away(f"{place} cannot be {what}: {str(error) or type(error).__name__}")
