"""A checkpoint of one object, without sailord: its manifest has only what ranks read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.checkpoint.manifest import PREFIX, hash_of
from worker.checkpoint.snapshot_file import head_checksum, read_head


def commit_object(*paths: Path) -> str:
    """Write the manifest beside its objects; return the manifest's URI."""
    about = [{"name": path.name, "checksum": head_checksum(read_head(path))} for path in paths]
    fields: dict[str, Any] = {"objects": about}
    manifest = paths[0].parent / f"{PREFIX}1.json"
    manifest.write_text(json.dumps({**fields, "sha256": hash_of(fields)}))
    return f"file://{manifest}"
