"""Makes a process write as the next or the previous version of this program would.

The next one adds a field to every record and message, at every level. The previous one leaves out
all that has a default: it did not know these fields yet. Both read as this version does.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.protocol import codec, versions

VARIABLE = "SAILOR_OTHER_VERSION"
SITE = Path(__file__).resolve().parent / "site"
ROOT = Path(__file__).resolve().parents[2]
FIELD = "of_the_next_version"
MARKS = {"ask", "order", "generation", "do", "result", "event"}
"""Fields that tell messages which are no records: to workers, of workers, to the fork server."""


def environment(version: int) -> dict[str, str]:
    """Return the environment of a process of that version: -1, 0 (this one) or 1."""
    if not version:
        return {}
    return {VARIABLE: str(version), "PYTHONPATH": os.pathsep.join((str(SITE), str(ROOT)))}


def written(value: object, version: int, plain: Callable[[object], Any] = codec.plain) -> Any:
    """Return the JSON of a record as that version writes it."""
    if isinstance(value, list | tuple):
        return [written(each, version, plain) for each in value]
    if not dataclasses.is_dataclass(value):
        return plain(value)
    names = [(each.name, each.default) for each in dataclasses.fields(value)]
    found = [(name, getattr(value, name), default) for name, default in names]
    kept = [pair for *pair, default in found if version >= 0 or pair[1] != default]
    raw = {name: written(each, version, plain) for name, each in kept}
    return raw | {FIELD: {"list": [1, {"more": None}]}} if version > 0 else raw


def install(version: int) -> None:
    """Change how this process encodes."""
    versions.SPEAKS += version
    versions.UNDERSTANDS_FROM = max(versions.SPEAKS - 1, 0)
    plain, dumps = codec.plain, json.dumps

    def other_dumps(value: Any, **options: Any) -> str:
        if version > 0 and isinstance(value, dict) and MARKS & value.keys():
            value = {**value, FIELD: True}
            if isinstance(value.get("spec"), dict):
                value["spec"] = {**value["spec"], FIELD: True}
        return dumps(value, **options)

    codec.plain = lambda value: written(value, version, plain)
    json.dumps = other_dumps  # type: ignore[assignment] # the same, but for what it adds
