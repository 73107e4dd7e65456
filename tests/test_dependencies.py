"""The bill of materials is that of the pins; advisories are told from those that do not apply."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "dependencies.py"


@pytest.fixture
def dependencies(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("dependencies")


def advisory(
    *events: dict[str, str], name: str = "Some.Package", **more: object
) -> dict[str, object]:
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}]
    package = {"ecosystem": "PyPI", "name": name}
    return {
        "id": "PYSEC-1",
        "summary": "reads too much",
        "affected": [{"package": package, "ranges": ranges, **more}],
    }


def test_the_bill_of_materials_in_the_wheel_is_that_of_the_pins(dependencies):
    written = (ROOT / "sailor" / "sbom.cdx.json").read_text(encoding="utf-8")
    assert written == dependencies.sbom_text(), "python scripts/dependencies.py sbom"
    bill = json.loads(written)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(bill["components"]) == len(pins)
    assert {"pkg:pypi/structlog", "pkg:pypi/python-dateutil"} <= {
        each["purl"].partition("@")[0] for each in bill["components"]
    }


@pytest.mark.parametrize(
    ("version", "events", "applies"),
    [
        ("1.5", [{"introduced": "0"}, {"fixed": "1.6"}], True),
        ("1.6", [{"introduced": "0"}, {"fixed": "1.6"}], False),
        ("1.10", [{"introduced": "1.9"}, {"fixed": "2"}], True),
        ("1.8", [{"introduced": "1.9"}, {"fixed": "2"}], False),
        ("2.1", [{"introduced": "1"}, {"fixed": "1.2"}, {"introduced": "2"}], True),
        ("1.5", [{"introduced": "1"}, {"fixed": "1.2"}, {"introduced": "2"}], False),
        ("1.5", [{"introduced": "0"}, {"last_affected": "1.5"}], True),
        ("1.6", [{"introduced": "0"}, {"last_affected": "1.5"}], False),
        ("1.5", [], False),
    ],
)
def test_versions_in_a_range_are_recognised(dependencies, version, events, applies):
    found = list(dependencies.applying({"some-package": version}, [advisory(*events)]))
    assert bool(found) is applies


def test_each_range_of_an_advisory_counts_in_any_order(dependencies):
    late = {"type": "ECOSYSTEM", "events": [{"introduced": "2"}, {"fixed": "3"}]}
    early = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.2"}]}
    both = advisory()
    both["affected"][0]["ranges"] = [late, early]
    applies = {
        version: bool(list(dependencies.applying({"some-package": version}, [both])))
        for version in ("1.0", "1.5", "2.5", "3")
    }
    assert applies == {"1.0": True, "1.5": False, "2.5": True, "3": False}


def test_advisories_for_other_packages_are_ignored(dependencies):
    every = {"introduced": "0"}
    others = [
        advisory(every, name="another"),
        {**advisory(every), "withdrawn": "2026-01-01T00:00:00Z"},
        {
            **advisory(every),
            "affected": [{"package": {"ecosystem": "npm", "name": "some-package"}}],
        },
        {"id": "PYSEC-2"},
    ]
    assert list(dependencies.applying({"some-package": "1"}, others)) == []
    listed = advisory(versions=["1"])
    (found,) = dependencies.applying({"some-package": "1"}, [listed])
    assert str(found) == (
        "some-package 1: PYSEC-1: reads too much (no version without it is known)"
    )


def audit(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "audit", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_audit_says_which_pins_are_affected(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        bad = advisory({"introduced": "0"}, {"fixed": "9999"}, name="aiohttp")
        archive.writestr("PYSEC-1.json", json.dumps(bad))
        archive.writestr("PYSEC-2.json", json.dumps(advisory({"introduced": "0"})))
    done = audit(tmp_path / "all.zip")
    assert done.returncode == 1
    assert "PYSEC-1: reads too much (fixed in 9999)" in done.stdout
    assert "advisories that apply: 1" in done.stdout


def test_a_file_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "all.zip").write_text("no")
    done = audit(tmp_path / "all.zip")
    assert (done.returncode, done.stdout) == (2, "")
    assert "all.zip cannot be read" in done.stderr
