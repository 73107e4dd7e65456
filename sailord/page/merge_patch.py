"""What changed in a document, as a merge patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that changed, with their new values; ``None`` removes a key.

    Lists are replaced as a whole. A value of ``None`` within the documents is the same as no value.
    """
    patch: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if value is old or value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            patch[key] = merge_patch(old, value)
        else:
            patch[key] = value
    patch.update((key, None) for key, old in before.items() if key not in after and old is not None)
    return patch
