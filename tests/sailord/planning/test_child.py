"""Planner processes import the planner and the messages, and nothing of the controller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import sys
from sailord.planning import capacity_search, child, plan_search
print(*sorted(name for name in sys.modules if name.startswith(("sailord.", "agents."))))
"""


def test_planner_process_imports_messages_but_not_the_controller():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "sailord.planning.messages" in loaded
    assert not loaded & {"sailord.core.model.state", "sailord.planning.pool", "agents.store"}
    assert not [name for name in loaded if name.startswith(("sailord.controller", "sailord.api"))]
