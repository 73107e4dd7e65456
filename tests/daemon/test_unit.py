"""systemd finds nothing to say about our unit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "sailord.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_the_unit_has_no_mistake_that_systemd_sees(tmp_path):
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    shutil.copy(UNIT, units)
    command = tmp_path / "opt" / "sailor" / "bin" / "sailord"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    theirs = Path("/usr/lib/systemd/system")
    if not theirs.is_dir():
        pytest.skip("systemd's own units are not here")
    (tmp_path / "usr" / "lib" / "systemd").mkdir(parents=True)
    (tmp_path / "usr" / "lib" / "systemd" / "system").symlink_to(theirs)
    shutil.copytree(theirs, tmp_path / "lib" / "systemd" / "system", symlinks=True)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--root", tmp_path, units / UNIT.name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "sailord" in line]
    assert ours == []
    assert "Type=notify" in UNIT.read_text()
