"""Entry points of a planner process: its start, and its requests.

``pool`` sends these functions by reference. The planner is imported when a request first needs it,
so that the controller itself never imports it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from importlib import import_module
from typing import Any

from agents.daemon.oom_score import end_before_the_daemon


def start(niceness: int) -> None:
    """Lower the priority, ignore Ctrl-C, and exit when sailord has ended."""
    os.nice(niceness)
    end_before_the_daemon()
    # Ctrl-C reaches the whole process group; sailord ends its planner processes itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent dies: a sailord killed by SIGKILL cannot end its planner processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def call(function: str, *arguments: object) -> Any:
    """Call a function of this package, named as ``module.function``; it may import the planner."""
    module, _, name = function.partition(".")
    return getattr(import_module(f"sailord.planning.{module}"), name)(*arguments)
