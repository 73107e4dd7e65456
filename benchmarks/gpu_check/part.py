"""Runs one part of the check in this process and writes what it found.

python -m benchmarks.gpu_check.part NAME DEVICE QUICK FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu_check.setting import Setting, SkippedError


def main(name: str, device: str, is_quick: str, folder: str) -> None:
    """Run the part; its answer is a file, so that it may print what it likes."""
    setting = Setting(device, is_quick == "quick", Path(folder))
    try:
        module = importlib.import_module(f"benchmarks.gpu_check.{name}")
        found = {"state": "done", "found": module.run(setting)}
    except SkippedError as error:
        found = {"state": "skipped", "why": str(error)}
    except ModuleNotFoundError as error:
        found = {"state": "skipped", "why": f"the package {error.name} is missing"}
    path = Path(folder, f".{name}.json")
    path.write_text(json.dumps(found, allow_nan=True), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
