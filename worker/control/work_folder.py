"""Enters the work folder of a script's job, as ``python train.py`` in that folder would find it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def enter(work: Mapping[str, Any]) -> None:
    """Make this process one of the job; a process never changes to another job."""
    if work:
        os.chdir(Path(work["folder"]))
