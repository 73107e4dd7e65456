"""Tells a user's mistake in a script that runs alone as one message, without a trace.

Python calls ``sys.excepthook`` only for an exception that nothing has caught. So a script may
still catch ``InputError``; pytest, debuggers and notebooks, which catch all exceptions, show what
they always show; and a session of ``python -i`` goes on. Ending the process in ``train()`` instead
would take each of these away.
"""

from __future__ import annotations

import sys
from types import TracebackType

from simulator.documents.problems import InputError
from worker.script.script_error import script_line


def print_input_errors() -> None:
    """Print an ``InputError`` that ends the process in one message; other errors as before."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InputError):
            before(kind, error, trace)
            return
        where = script_line(error)
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        if where is not None:
            print(f"  in {where}", file=sys.stderr)

    sys.excepthook = hook
