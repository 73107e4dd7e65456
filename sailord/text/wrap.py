"""Text that fits the width of a terminal: lines break between words."""

from __future__ import annotations

import textwrap

LABEL = 12
"""Columns of the labels of an answer (``throughput  ``); continuation lines are indented as far."""


def wrapped(text: str, width: int) -> str:
    """Return the text with long lines broken between words, and their continuations indented."""
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width or width < 3 * LABEL:
        return [line]
    begin = len(line) - len(line.lstrip(" "))
    has_label = line[LABEL - 1 : LABEL] == " " and line[LABEL : LABEL + 1] not in ("", " ")
    is_labelled = has_label and begin in (0, LABEL) and "  " not in line[LABEL:].rstrip()
    indent = LABEL if is_labelled else begin + 2
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    ) or [line]
