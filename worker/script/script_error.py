"""What a user reads of an exception in a script: its own frames, and one sentence with its line."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

import worker

PACKAGES = ("agents", "planner", "sailor", "sailord", "simulator", "worker")
"""Of Sailor; a script's own modules cannot have these names."""
_OURS = tuple(f"{Path(worker.__file__).resolve().parents[1] / each}{os.sep}" for each in PACKAGES)
_LIBRARIES = (
    *(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")),
    f"{sysconfig.get_path('stdlib')}{os.sep}",
)
MESSAGE_MAX = 300
FAILURE_MAX = 2_000


def script_line(error: BaseException) -> str | None:
    """Return the script's last line on the way to the error, as ``train.py:20 in forward``."""
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_scripts(frame)]
    if not found:
        return None
    last = found[-1]
    within = "" if last.name.startswith("<") else f" in {last.name}"
    return f"{_shorten_path(last.filename)}:{last.lineno}{within}"


def sentence(error: BaseException, hide: Callable[[str], str] = str) -> str:
    """Return one line: the exception, and its place in the script; ``hide`` removes secrets.

    The place includes notes that were added on the way, such as the sample.
    """
    message = hide(str(error)).partition("\n")[0][:MESSAGE_MAX]
    what = type(error).__name__ + (f": {message}" if message else "")
    line = script_line(error)
    notes = (hide(each).partition("\n")[0] for each in getattr(error, "__notes__", ()))
    where = ", ".join([*(() if line is None else (line,)), *notes])
    return f"{what} ({where})" if where else what


def in_brief(failure: str) -> str:
    """Return what a status says of a failure, whose text may have any length; a log has it all."""
    return " ".join(failure.splitlines())[:FAILURE_MAX]


def script_traceback(error: BaseException) -> str:
    """Return the traceback from the script's first frame on, without Sailor's frames.

    An error that the script has no part in keeps all of them.
    """
    told = traceback.TracebackException.from_exception(error)
    if script_line(error) is not None:
        each: traceback.TracebackException | None = told
        while each is not None:
            each.stack = _drop_own_frames(each.stack)
            each = each.__cause__ or each.__context__
    return "".join(told.format())


def print_script_traceback(error: BaseException) -> None:
    """Write it to stderr."""
    print(script_traceback(error), end="", file=sys.stderr, flush=True)


def _drop_own_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    first = next((number for number, frame in enumerate(stack) if _is_scripts(frame)), 0)
    kept = [frame for frame in stack[first:] if not frame.filename.startswith(_OURS)]
    return traceback.StackSummary.from_list(kept)


def _is_scripts(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    is_library = any(part in name for part in _LIBRARIES)
    return not (name.startswith(("<", *_OURS)) or is_library)


def _shorten_path(name: str) -> str:
    """Name a file relative to the present folder, if it is in it."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
