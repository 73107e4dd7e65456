"""Compares a node's packages with those of the job's first node, and makes constraints of them.

Later nodes install the same versions, since ``pip`` takes them as constraints. A node whose setup
installed other versions all the same reports them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

SHOWN = 3
_NOT_COMPARED = frozenset({"pip", "setuptools", "wheel"})
"""Packages that make the environment, and differ between versions of Python."""


class PackagesDifferError(Exception):
    """This node has other versions than the job's first node; the message names them."""


def installed(packages: Path) -> dict[str, str]:
    """Return the versions of what is installed in a folder of packages.

    It reads only names of folders, and opens no file of the job.
    """
    found = {}
    for each in packages.glob("*.dist-info"):
        name, _, version = each.stem.rpartition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name and name not in _NOT_COMPARED:
            found[name] = version
    return found


def as_text(versions: Mapping[str, str]) -> str:
    """Return versions as a constraints file for ``pip``."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def from_text(text: str) -> dict[str, str]:
    """Read ``as_text``."""
    pairs = (line.partition("==") for line in text.splitlines())
    return {name: version for name, _, version in pairs}


def check_agreed(versions: Mapping[str, str], agreed: str) -> None:
    """Raise ``PackagesDifferError`` unless these are the versions of the job's first node."""
    first = from_text(agreed)
    differ = sorted(
        name for name in first.keys() | versions.keys() if first.get(name) != versions.get(name)
    )
    if not differ:
        return
    shown = [
        f"{name} is {versions.get(name, 'missing')} here and {first.get(name, 'missing')} there"
        for name in differ[:SHOWN]
    ]
    more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    what = f"setup installed other packages than on the job's first node: {', '.join(shown)}{more}"
    raise PackagesDifferError(f"{what}; name versions in the setup command")
