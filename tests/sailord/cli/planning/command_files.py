"""Files of a small question, and a command of the planner that is given them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from sailord.cli.main import main

JOB_TEXT = """
[model]
preset = "opt-125m"
[training]
global_batch = 64
sequence = 512
precision = "fp32"
optimizer = "adam"
micro_batches = [4, 8]
"""
CLUSTER_TEXT = """
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 4
gpus = 16
"""


def run_on(folder: Path, command: str, files: Mapping[str, str], *more: str) -> Result:
    """Write the files, and run a command with them as its arguments."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return CliRunner().invoke(main, [command, *(str(folder / name) for name in files), *more])
