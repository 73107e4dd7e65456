"""Makes a process write as the next or the previous version of this program would.

The next one adds a field to every record and message, at every level. The previous one leaves out
all that has a default: it did not know these fields yet. Both read as this version does.
"""

from __future__ import annotations

import dataclasses
import json
import os
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


def install(version: int) -> None:
    """Change how this process encodes."""
    versions.SPEAKS += version
    versions.UNDERSTANDS_FROM = max(versions.SPEAKS - 1, 0)
    plain, dumps = codec.plain, json.dumps

    def other_plain(value: object) -> Any:
        raw = plain(value)  # It calls itself by this name, and so adds to the records within.
        if not dataclasses.is_dataclass(value):
            return raw
        if version > 0:
            return raw | {FIELD: {"list": [1, {"more": None}]}}
        fields = dataclasses.fields(value)
        kept = {each.name for each in fields if each.default != getattr(value, each.name)}
        return {name: each for name, each in raw.items() if name in kept}

    def other_dumps(value: Any, **options: Any) -> str:
        if version > 0 and isinstance(value, dict) and MARKS & value.keys():
            value = {**value, FIELD: True}
            if isinstance(value.get("spec"), dict):
                value["spec"] = {**value["spec"], FIELD: True}
        return dumps(value, **options)

    codec.plain = other_plain
    json.dumps = other_dumps  # type: ignore[assignment] # the same, but for what it adds
