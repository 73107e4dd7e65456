"""The modules that a command of ``sailorctl`` imports, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OURS = {
    *("agents", "agents.daemon", "agents.daemon.backoff"),
    *("simulator", "simulator.documents", "simulator.documents.problems"),
    *("sailord", "sailord.cli", "sailord.client", "sailord.text"),
}
"""What it may import of ours, besides modules of ``sailord.cli`` and ``sailord.text``."""
SLOW = {"asyncio", "multiprocessing", "concurrent", "importlib.metadata", "tomllib", "zipfile"}
"""Modules of the standard library that it must not import."""


def modules_of(*arguments: str) -> set[str]:
    """Run a command in a fresh process; return the names of all modules that it imported."""
    code = (
        "import sys, json\n"
        "before = set(sys.modules)\n"
        "from sailord.cli.main import main\n"
        f"try: main({list(arguments)!r}, standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def excess_of(modules: set[str]) -> set[str]:
    """Return the modules that a command which only asks sailord should not have imported."""
    light = ("sailord.cli.", "sailord.text.", "click")
    others = {name for name in modules if not name.startswith(light)} - OURS
    return {
        name
        for name in others
        if name.partition(".")[0] not in sys.stdlib_module_names
        or name in SLOW
        or name.partition(".")[0] in SLOW
    } - {"__editable___sailor_0_1_0_finder"}
