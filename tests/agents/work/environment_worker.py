"""What a fork server forks in these tests: a worker that enters its job's work folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simulator.documents.problems import InputError
from worker.control.work_folder import check, enter_job, redact

LOADED_BEFORE = np.__name__


def main(spec: Mapping[str, Any]) -> int:
    """Write what the script of the job would see."""
    enter_job(spec["work"])
    try:
        check(spec["work"])
        import tiny  # noqa: PLC0415 - it is there only now

        seen = {"tiny": tiny.VERSION, "cwd": os.getcwd(), "secret": os.environ.get("A_SECRET")}
        seen["shown"] = redact(f"{os.environ.get('A_SECRET')} and the end of it")
    except InputError as error:
        seen = {"problems": [str(problem) for problem in error.problems]}
    Path(spec["out"]).write_text(json.dumps(seen))
    return 0
