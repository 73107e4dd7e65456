"""Where packages come from, and what fetches them to a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.work.fetch import PackageFetcher
from tests.agents.work.preparing import Sources


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
def fetcher(tmp_path: Path, sources: Sources) -> PackageFetcher:
    return PackageFetcher(tmp_path / "node" / "packages", sources, sources.addresses)
