"""SIGHUP: a service reads its configuration again, and says what needs a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from simulator.documents.files import load_document
from simulator.documents.problems import InputError

log = structlog.get_logger("reload")
T = TypeVar("T")


@dataclass(eq=False)
class Reload(Generic[T]):
    """Called to read the configuration again; what is wrong then changes nothing.

    Certificates, the cluster's key and named tokens are not its matter: they are read again
    whenever their files change.
    """

    path: Path
    load: Callable[[Path], T]
    apply: Callable[[T], None]
    keys: frozenset[str]
    """What ``apply`` changes; a change of another key needs a restart."""
    files: tuple[Path, ...] = ()
    """Other files whose change needs a restart."""
    _began_with: tuple[dict[str, Any], list[object]] = field(init=False)

    def __post_init__(self) -> None:
        self._began_with = self._read()

    def __call__(self) -> None:
        """Read the file, and the files that it names, again."""
        try:
            config, (data, stamps) = self.load(self.path), self._read()
        except InputError as error:
            log.error("the configuration is invalid, and stays as it was", error=str(error))
            return
        self.apply(config)
        log.info("the configuration was read again", file=str(self.path))
        old, old_stamps = self._began_with
        late = [key for key in changed_keys(old, data) if key not in self.keys]
        pairs = zip(self.files, old_stamps, stamps, strict=True)
        late += [str(file) for file, before, now in pairs if before != now]
        if late:
            log.warning(f"what was changed needs a restart: {', '.join(late)}")

    def _read(self) -> tuple[dict[str, Any], list[object]]:
        data = load_document(self.path, flaws_raise=False).data
        return data, [_stamp(file) for file in self.files]


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values differ, those of tables as ``table.key``."""
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict | None) and isinstance(now, dict | None):
            for inner in changed_keys(before or {}, now or {}):
                yield f"{key}.{inner}"
        elif before != now:
            yield key


def _stamp(file: Path) -> object:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
