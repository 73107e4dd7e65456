"""The version of Sailor that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the installed package; a checkout alone has none."""
    try:
        return version("sailor")
    except PackageNotFoundError:
        return "0+checkout"
