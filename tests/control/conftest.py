"""Clusters of real processes that end with their test."""

from __future__ import annotations

import pytest

from tests.control.cluster import Cluster
from tests.sailord.daemon.running import Place


@pytest.fixture
def cluster(tmp_path):
    """One sailord with an embedded store."""
    made = Cluster(tmp_path, [Place(tmp_path)])
    yield made
    made.end()
