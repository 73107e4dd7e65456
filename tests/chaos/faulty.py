"""An object store that fails on demand: ``faulty:///FOLDER``, known to fsspec inside the storm.

The file that ``SAILOR_CHAOS_OBJECTS`` names selects the current failure; without it there is none:

- *errors*: three of ten calls fail
- *short*: writes are truncated to half, without an error
- *twice*: the answer is lost after the write, so that the client repeats it
"""

from __future__ import annotations

import io
import os
import random
import uuid
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

TROUBLE = "SAILOR_CHAOS_OBJECTS"
KINDS = ("errors", "short", "twice")
SHARE = 0.3
UNSEEN = ".new-"
"""Suffix of incomplete uploads, which are not listed."""


class Faulty(AbstractFileSystem):  # type: ignore[misc] # it comes without types
    """Objects in a folder, written atomically except for the injected failures."""

    protocol = "faulty"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        _may_fail()
        return _about(Path(self._strip_protocol(path)))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        _may_fail()
        folder = Path(self._strip_protocol(path))
        if folder.is_file():
            found = [_about(folder)]
        else:
            names = (each for each in folder.iterdir() if not each.name.startswith(UNSEEN))
            found = [_about(each) for each in sorted(names)]
        return found if detail else [each["name"] for each in found]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        _may_fail()
        return Path(self._strip_protocol(path)).read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        _write(Path(self._strip_protocol(path)), value, is_new=mode == "create")

    def rm_file(self, path: str) -> None:
        _may_fail()
        file = Path(self._strip_protocol(path))
        file.unlink()
        _may_lose_answer()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass  # Object stores have no folders.

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Upload(Path(self._strip_protocol(path)), autocommit, is_new=mode == "xb")


class _Upload(io.BytesIO):
    """An upload that becomes visible on commit."""

    def __init__(self, path: Path, autocommit: bool, *, is_new: bool) -> None:
        super().__init__()
        self._path, self._data, self._autocommit = path, b"", autocommit
        self._is_new = is_new

    def close(self) -> None:
        if not self.closed:
            self._data = self.getvalue()
            super().close()
            if self._autocommit:
                self.commit()

    def commit(self) -> None:
        _write(self._path, self._data, is_new=self._is_new)

    def discard(self) -> None:
        self._data = b""


def _about(path: Path) -> dict[str, Any]:
    kind = "directory" if path.is_dir() else "file"
    return {"name": str(path), "size": path.stat().st_size, "type": kind}


def _write(path: Path, data: bytes, *, is_new: bool) -> None:
    _may_fail()
    if _trouble() == "short" and random.random() < SHARE:
        data = data[: len(data) // 2]
    path.parent.mkdir(parents=True, exist_ok=True)
    early = path.with_name(f"{UNSEEN}{uuid.uuid4().hex}")
    early.write_bytes(data)
    if is_new:
        try:
            path.hardlink_to(early)  # Of two concurrent creations one fails.
        finally:
            early.unlink()
    else:
        early.rename(path)
    _may_lose_answer()


def _trouble() -> str:
    try:
        return Path(os.environ[TROUBLE]).read_text(encoding="utf-8")
    except (KeyError, FileNotFoundError):
        return ""


def _may_fail() -> None:
    if _trouble() == "errors" and random.random() < SHARE:
        raise OSError("503: the storage is overloaded")


def _may_lose_answer() -> None:
    if _trouble() == "twice" and random.random() < SHARE:
        raise OSError("the connection was reset before the answer came")
