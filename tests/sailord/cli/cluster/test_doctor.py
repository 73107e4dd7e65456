"""``doctor`` fails without a sailord."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from sailord.cli.main import main
from sailord.cli.shared.exit_codes import FAILED


def test_doctor_fails_if_sailord_does_not_answer(tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/none.sock"
    found = CliRunner().invoke(main, ["doctor", "--server", where])
    assert found.exit_code == FAILED
    assert "no problems found" not in found.output
    assert "start sailord" in found.output
