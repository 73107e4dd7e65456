"""The commands ``profile ...``: measure what predictions are otherwise computed from."""

from __future__ import annotations

import click


@click.group()
def profile() -> None:
    """Measure a model's layers and a cluster's links."""
