"""Tables for terminals: aligned columns under a header, in plain text.

Columns of numbers are right-aligned, all others left-aligned. A terminal without UTF-8 gets ASCII.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence

from sailord.text.printable import printable

GAP = "  "
# A number with sign, currency, thousands, exponent; a second one after a slash; a short unit.
# "-" and an empty cell are unknown numbers.
_DIGITS = r"[+-]?\$?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"
_NUMBER = re.compile(rf"-|\u2212|~?{_DIGITS}(/{_DIGITS})?( ?(%|[A-Za-z/]{{1,9}}))?|", re.IGNORECASE)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, unicode: bool | None = None
) -> str:
    """Lay out rows under a header; the encoding of stdout decides ``unicode`` unless given."""
    assert all(len(row) == len(header) for row in rows), "a row has one cell per column"
    plain = not (is_utf8(sys.stdout.encoding) if unicode is None else unicode)
    head = [_clean(cell, plain=plain) for cell in header]
    body = [[_clean(cell, plain=plain) for cell in row] for row in rows]
    columns = list(zip(head, *body, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    right_aligned = [bool(body) and all(map(_NUMBER.fullmatch, column[1:])) for column in columns]
    rule = ["-" * width if plain else "─" * width for width in widths]
    return "\n".join(_line(cells, widths, right_aligned) for cells in (head, rule, *body))


def is_utf8(encoding: str | None) -> bool:
    """Return whether a stream of this encoding can show more than ASCII."""
    return encoding is not None and encoding.lower().replace("-", "").replace("_", "") in (
        "utf8",
        "utf8sig",
        "cp65001",
    )


def _line(cells: Sequence[str], widths: Sequence[int], right_aligned: Sequence[bool]) -> str:
    parts = []
    for cell, width, right in zip(cells, widths, right_aligned, strict=True):
        padding = " " * (width - _width(cell))
        parts.append(padding + cell if right else cell + padding)
    return GAP.join(parts).rstrip()


def _clean(cell: str, *, plain: bool) -> str:
    """Replace control characters, which names from files may contain."""
    safe = printable(cell, keep="")
    return safe.encode("ascii", "replace").decode("ascii") if plain else safe


def _width(cell: str) -> int:
    """Return how many columns of the terminal a text takes."""
    return sum(
        2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in cell
        if not unicodedata.combining(letter)
    )
