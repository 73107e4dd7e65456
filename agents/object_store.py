"""Writes objects once: on a file system, or in an object store that fsspec supports.

An object has one name forever and appears as a whole or not at all. On a file system it is
written to a temporary file, flushed to the disk and renamed. An object store is asked to create
the object only if the name is free, and the object is read back.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from worker.atomic_file import replacing, sync_folder

_CHUNK_BYTES = 4 * 2**20
_PROTOCOLS_OF_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl"})
"""They have no folders: to make one creates a bucket, even of a mistyped name."""


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """What to write; ``chunks`` is called again for a second attempt."""

    chunks: Callable[[], Iterable[bytes]]
    size: int
    head: bytes
    """The first bytes, which identify the content: the whole of it, or a header with checksums."""


def whole(data: bytes) -> ObjectContent:
    """Return a content that is in memory."""
    return ObjectContent(lambda: (data,), len(data), data)


def of_file(path: Path, head: bytes) -> ObjectContent:
    """Return the content of a file that begins with ``head``; it is read chunk by chunk."""

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data

    return ObjectContent(chunks, path.stat().st_size, head)


def write_once(files: Any, target: str, content: ObjectContent) -> None:
    """Write an object; raises ``FileExistsError`` if the name holds another one.

    ``files`` is a file system of fsspec and ``target`` a path in it. To write the same object
    again is no error. An incomplete object of an earlier attempt is deleted, and ``OSError`` says
    that the write has to be tried again.
    """
    if isinstance(files, LocalFileSystem):
        if not files.exists(target) or _is_incomplete(files, target, content):
            _write_file(Path(target), content)
        elif not _is_complete(files, target, content):
            raise FileExistsError("another object has that name already")
        return
    if _PROTOCOLS_OF_BUCKETS.isdisjoint(_protocols(files)):
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
    try:
        _create(files, target, content, "xb")
    except FileExistsError:
        # The answer to an earlier attempt was lost, or another writer took the name.
        if _is_incomplete(files, target, content):
            files.rm_file(target)
            raise OSError("an incomplete object had that name and was deleted; retry") from None
        if not _is_complete(files, target, content):
            raise FileExistsError("another object has that name already") from None
    except Exception as error:
        if not _lacks_exclusive_creation(error):
            raise
        _create(files, target, content, "wb")


def _create(files: Any, target: str, content: ObjectContent, mode: str) -> None:
    """Write the object; with mode ``xb`` only if the name is free."""
    out = files.open(target, mode, autocommit=False)
    try:
        for chunk in content.chunks():
            out.write(chunk)
        out.close()
        out.commit()
        if not _is_complete(files, target, content):
            raise OSError("what was read back differs from what was written")
    except FileExistsError:
        _discard(out)
        raise
    except BaseException:
        _discard(out)
        with contextlib.suppress(Exception):
            # An incomplete object is ours alone; another one may be in use already.
            if _is_incomplete(files, target, content):
                files.rm_file(target)
        raise
    finally:
        # fsspec adds files without autocommit to a transaction that is never ended.
        with contextlib.suppress(AttributeError, ValueError):
            files.transaction.files.remove(out)


def _discard(out: Any) -> None:
    """Give up an upload: what it has uploaded is deleted, and nothing more is sent."""
    with contextlib.suppress(Exception):
        out.discard()
    with contextlib.suppress(AttributeError):  # A file in memory.
        out.closed = True  # Else fsspec flushes it when Python frees it.


def _protocols(files: Any) -> Iterable[str]:
    """Return the schemes of the URIs that a file system serves."""
    return (files.protocol,) if isinstance(files.protocol, str) else files.protocol


def _lacks_exclusive_creation(error: Exception) -> bool:
    """Return whether the store or its client cannot create an object only if the name is free."""
    is_refused = isinstance(error, OSError) and error.errno in (errno.ENOSYS, errno.EOPNOTSUPP)
    return is_refused or isinstance(error, NotImplementedError) or type(error) is ValueError


def _is_complete(files: Any, target: str, content: ObjectContent) -> bool:
    files.invalidate_cache()
    size = files.info(target)["size"]
    found = files.cat_file(target, start=0, end=len(content.head))
    return bool(size == content.size and found == content.head)


def _is_incomplete(files: Any, target: str, content: ObjectContent) -> bool:
    """Return whether the object is a beginning of this content."""
    files.invalidate_cache()
    size = files.info(target)["size"]
    end = min(len(content.head), size)
    found = files.cat_file(target, start=0, end=end) if size else b""
    return bool(size < content.size and content.head.startswith(found))


def _write_file(target: Path, content: ObjectContent) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, suffix=uuid.uuid4().hex[:8]) as file:
        for chunk in content.chunks():
            file.write(chunk)
    for folder in target.parent.parents[:2]:  # They may be new too.
        sync_folder(folder)
