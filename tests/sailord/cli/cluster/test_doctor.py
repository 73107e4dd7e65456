"""``doctor`` fails without a sailord; a leader that is older lists no problems itself."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from sailord.cli.cluster.doctor import _main_problems
from sailord.cli.main import main
from sailord.cli.shared.exit_codes import FAILED

WELL = {"leader": {"host": "h"}, "store": {"answers": True}, "job": None}
NODE = {"name": "a", "state": "ready", "failure": "", "why_lost": ""}


def test_doctor_passes_with_a_healthy_older_leader() -> None:
    running = {"id": "j", "phase": {"name": "running", "reason": ""}}
    assert [*_main_problems({**WELL, "job": running}, [NODE])] == []


def test_main_problems_of_an_older_leader_are_shown() -> None:
    held = {"id": "j", "phase": {"name": "held", "reason": "no money"}}
    status = {"leader": None, "store": {"answers": False}, "job": held}
    lost = {**NODE, "state": "lost", "why_lost": "silent"}
    found = [*_main_problems(status, [lost, NODE])]
    assert [each.split()[0] for each in found] == ["no", "the", "j", "a"]
    assert found[2:] == ["j is held: no money", "a is lost: silent"]


def test_doctor_fails_if_sailord_does_not_answer(tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/none.sock"
    found = CliRunner().invoke(main, ["doctor", "--server", where])
    assert found.exit_code == FAILED
    assert "no problems found" not in found.output
    assert "start sailord" in found.output
