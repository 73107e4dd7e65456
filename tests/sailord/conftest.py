"""Places on which real processes run, and that end with their test; another local time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.sailord.daemon.running import Place


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.stop_all()


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let local time be that of Berlin, an hour or two ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()
