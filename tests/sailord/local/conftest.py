"""The folder of a local cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.daemon.process_cleanup import kill_all
from sailord.local.paths import LocalFolders


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a cluster of the test, which is killed at the end.

    Sockets have short addresses; pytest's own folders are too deep.
    """
    base = Path(tempfile.mkdtemp(prefix="c-"))
    yield base / "c"
    kill_all(base / "c")
    LocalFolders(base / "c", port=0).remove()
    shutil.rmtree(base)
