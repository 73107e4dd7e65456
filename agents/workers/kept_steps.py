"""Reads when the passes of a worker's last steps ran, from the file that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agents.protocol.codec import WireError, decode
from agents.protocol.records import KeptSteps
from worker.plain_file import open_plain

FILE = "steps.json"
BYTES_MAX = 1 << 18


def read_kept_steps(folder: Path, now: float) -> KeptSteps | None:
    """Read the steps that the rank of a folder has kept; ``None``: none that can be read."""
    try:
        with open_plain(folder / FILE) as file:
            return replace(decode(KeptSteps, file.read(BYTES_MAX)), now=now)
    except (OSError, WireError):
        return None
