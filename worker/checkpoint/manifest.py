"""The file of a checkpoint's manifest: JSON that contains its own hash, so that damage is detected.

sailord writes it, and types its fields in ``sailord/checkpoints/manifest.py``; needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from worker.checkpoint.snapshot_file import SnapshotError

T = TypeVar("T")

FORMAT = 1
PREFIX = "manifest-"
"""Of the file's name."""


class ManifestError(SnapshotError):
    """The file is not a manifest, or is damaged."""


def hash_of(fields: Mapping[str, Any]) -> str:
    """Return the hash of all that a manifest holds, known to this version or not."""
    text = json.dumps({**fields, "sha256": ""}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_fields(data: bytes, *, name: str) -> dict[str, Any]:
    """Parse a manifest and verify its format and hash; raises ``ManifestError``."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = "is truncated or damaged" if data.startswith(b"{") else "is not a manifest"
        raise ManifestError(f"{name} {what}: {error}") from None
    if not isinstance(fields, dict) or "sha256" not in fields:
        raise ManifestError(f"{name} is not a manifest")
    if fields.get("format", FORMAT) != FORMAT:
        raise ManifestError(f"{name} has format {fields['format']}; this version reads {FORMAT}")
    if hash_of(fields) != fields["sha256"]:
        raise ManifestError(f"{name} was changed: its hash does not match")
    return fields


def older(
    found: Iterable[tuple[tuple[int, int], T]], point: tuple[int, int] | None
) -> list[tuple[tuple[int, int], T]]:
    """Return checkpoints that are older than a point (or all), newest first.

    Those are of an earlier step and no later generation, which may have begun before that step.
    """
    newest_first = sorted(found, key=lambda pair: pair[0], reverse=True)
    return [
        (each, value)
        for each, value in newest_first
        if point is None or (each[1] < point[1] and each[0] <= point[0])
    ]
