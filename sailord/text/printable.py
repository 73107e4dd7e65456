"""Takes escape sequences, which a terminal would obey, out of the text of jobs and files."""

from __future__ import annotations

import unicodedata


def printable(text: str, keep: str = "\n\t") -> str:
    """Return the text with ``?`` for each control character but those to keep.

    A carriage return becomes the end of a line, as after each update of a progress bar.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        letter if letter in keep or unicodedata.category(letter) not in _CONTROLS else "?"
        for letter in lines
    )


_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Also halves of surrogate pairs, as in a file's name that is no UTF-8: none can be printed."""
