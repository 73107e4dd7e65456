"""Clusters on which real processes run, as other tests have them."""

from __future__ import annotations

from tests.control.conftest import cluster

__all__ = ["cluster"]
