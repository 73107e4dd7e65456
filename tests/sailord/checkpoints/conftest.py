"""Places and clusters on which real processes run, as other tests have them."""

from __future__ import annotations

from tests.control.conftest import cluster
from tests.sailord.daemon.conftest import place

__all__ = ["cluster", "place"]
