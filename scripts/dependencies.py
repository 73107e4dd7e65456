"""Writes a bill of materials, and compares the pinned packages with known advisories.

``python scripts/dependencies.py sbom`` writes ``sailor/sbom.cdx.json`` (CycloneDX 1.6), which lies
in the wheel: every pinned package. ``audit FILE`` compares the pins with the advisories of FILE, a
zip archive of OSV documents such as
https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip, and exits with 1 if one applies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
SBOM = ROOT / "sailor" / "sbom.cdx.json"


@dataclass(frozen=True)
class Advisory:
    """An advisory that applies to a pinned package."""

    package: str
    version: str
    id: str
    summary: str
    fixed: tuple[str, ...]
    """The first versions without the fault."""

    def __str__(self) -> str:
        cure = (
            f"fixed in {', '.join(self.fixed)}" if self.fixed else "no version without it is known"
        )
        return f"{self.package} {self.version}: {self.id}: {self.summary} ({cure})"


def pins(text: str) -> dict[str, str]:
    """Return the versions of ``constraints.txt``, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


def bill(project: Mapping[str, Any], pinned: Mapping[str, str]) -> dict[str, Any]:
    """Return the bill of materials, which depends on the pins alone."""
    name, version = project["name"], project["version"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [
            {
                "type": "library",
                "name": each,
                "version": pinned[each],
                "purl": f"pkg:pypi/{each}@{pinned[each]}",
            }
            for each in sorted(pinned)
        ],
    }


def sbom_text() -> str:
    """Return the bill of materials of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    return json.dumps(bill(project, pinned), indent=1) + "\n"


def applying(
    pinned: Mapping[str, str], documents: Iterable[Mapping[str, Any]]
) -> Iterator[Advisory]:
    """Yield the advisories that apply to a pinned version."""
    for document in documents:
        if "withdrawn" in document:
            continue
        for affected in document.get("affected", ()):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") != "PyPI" or name not in pinned:
                continue
            version = pinned[name]
            ranges = [each for each in affected.get("ranges", ()) if each["type"] == "ECOSYSTEM"]
            is_in = any(_is_in_range(Version(version), each) for each in ranges)
            if is_in or version in affected.get("versions", ()):
                told = document.get("summary") or document.get("details", "").partition("\n")[0]
                yield Advisory(name, version, document["id"], told, tuple(_fixed_versions(ranges)))
                break


def _is_in_range(version: Version, versions: Mapping[str, Any]) -> bool:
    is_in = False
    for event, text in (pair for each in versions["events"] for pair in each.items()):
        try:
            limit = Version(text) if text != "0" else Version("0.dev0")
        except InvalidVersion:
            continue
        match event:
            case "introduced":
                is_in = is_in or version >= limit
            case "fixed":
                is_in = is_in and version < limit
            case "last_affected":
                is_in = is_in and version <= limit
            case _:
                pass
    return is_in


def _fixed_versions(ranges: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    return (event["fixed"] for each in ranges for event in each["events"] if "fixed" in event)


def documents_in(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the OSV documents of a zip archive."""
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json"):
                yield json.loads(archive.read(name))


def main() -> int:
    """Read the arguments, and do as they say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    orders = parser.add_subparsers(dest="order", required=True)
    orders.add_parser("sbom", help="write the bill of materials")
    audit = orders.add_parser("audit", help="compare the pins with advisories")
    audit.add_argument("file", type=Path, help="a zip archive of OSV documents")
    arguments = parser.parse_args()
    if arguments.order == "sbom":
        SBOM.write_text(sbom_text(), encoding="utf-8")
        return 0
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    try:
        found = list(applying(pinned, documents_in(arguments.file)))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        print(f"error: {arguments.file} cannot be read: {error}", file=sys.stderr)
        return 2
    for each in found:
        print(each)
    print(f"{len(pinned)} packages; advisories that apply: {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
