"""Places on which real processes run, and that end with their test."""

from __future__ import annotations

import pytest

from tests.sailord.daemon.running import Place


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.stop_all()
