"""Workers' logs for people: JSON lines as sentences, all others unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sailord.text.units import clock


def log_text(text: str) -> str:
    """Return lines of a log as a person reads them."""
    return "".join(_line(line) for line in text.splitlines(keepends=True))


def whole_lines(text: str) -> tuple[str, str]:
    """Split text into whole lines and an unfinished last one."""
    end = text.rfind("\n") + 1
    return text[:end], text[end:]


def _line(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        said = json.loads(line)
    except ValueError:
        return line
    if not isinstance(said, dict) or not isinstance(said.get("step"), int):
        return line
    if not isinstance(said.get("evaluation", {}), dict):
        return line  # The script's own.
    return _format_step(said) + "\n"


def _format_step(said: Mapping[str, Any]) -> str:
    """Return a step or an evaluation as text: when, which, and its figures with four digits."""
    at, begin = said.get("at"), ""
    if isinstance(at, int | float):
        with suppress(ValueError, OverflowError, OSError):  # A script may count milliseconds.
            begin = f"{clock(at)}  "
    about = f"step {said['step']}" + (f" of {said['job']}" if said.get("job") else "")
    figures = said.get("evaluation", {name: said[name] for name in said if name not in _TOLD})
    words = [_word(name, value) for name, value in figures.items()]
    what = "evaluation after " if "evaluation" in said else ""
    return f"{begin}{what}{about}: {', '.join(words)}"


def _word(name: str, value: Any) -> str:
    """A figure with its name: ``loss 3.2``, ``34.4 samples/s``, ``0.47 s``."""
    if name.endswith(_PER_S):
        return f"{_figure(name, value)} {name.removesuffix(_PER_S)}/s"
    return _figure(name, value) if name == "seconds" else f"{name} {_figure(name, value)}"


_PER_S = "_per_s"
_TOLD = ("at", "job", "step", "generation", "sample_hash")


def _figure(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    is_time = name == "seconds" or (name.endswith("_s") and not name.endswith(_PER_S))
    return f"{text} s" if is_time else text
