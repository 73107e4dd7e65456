"""Small tables for terminals: aligned columns under a header, in plain text.

Columns of numbers stand to the right, all others to the left. Where the terminal does not
speak UTF-8, nothing but ASCII is used.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence

GAP = "  "
# A figure as people write it: sign, currency, thousands, power; a second figure after a slash;
# a unit of a few letters. "-" and nothing at all stand for a figure that is not known.
_FIGURE = r"[+-]?\$?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"
_NUMBER = re.compile(rf"-|\u2212|~?{_FIGURE}(/{_FIGURE})?( ?(%|[A-Za-z/]{{1,9}}))?|", re.IGNORECASE)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, unicode: bool | None = None
) -> str:
    """Lay out rows under a header; ``unicode`` is told by standard output when not given."""
    assert all(len(row) == len(header) for row in rows), "every row has a cell for every column"
    plain = not (speaks_utf8(sys.stdout.encoding) if unicode is None else unicode)
    head = [_clean(cell, plain=plain) for cell in header]
    body = [[_clean(cell, plain=plain) for cell in row] for row in rows]
    columns = list(zip(head, *body, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    to_right = [bool(body) and all(map(_NUMBER.fullmatch, column[1:])) for column in columns]
    rule = ["-" * width if plain else "─" * width for width in widths]
    return "\n".join(_line(cells, widths, to_right) for cells in (head, rule, *body))


def speaks_utf8(encoding: str | None) -> bool:
    """Whether a stream of that encoding can show more than ASCII."""
    return encoding is not None and encoding.lower().replace("-", "").replace("_", "") in (
        "utf8",
        "utf8sig",
        "cp65001",
    )


def _line(cells: Sequence[str], widths: Sequence[int], to_right: Sequence[bool]) -> str:
    parts = []
    for cell, width, right in zip(cells, widths, to_right, strict=True):
        padding = " " * (width - _width(cell))
        parts.append(padding + cell if right else cell + padding)
    return GAP.join(parts).rstrip()


def _clean(cell: str, *, plain: bool) -> str:
    """A cell in one line that cannot steer the terminal, as names from files might."""
    safe = "".join(
        "?" if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp") else letter
        for letter in cell
    )
    return safe.encode("ascii", "replace").decode("ascii") if plain else safe


def _width(cell: str) -> int:
    """Columns of the terminal that a text takes."""
    return sum(
        2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in cell
        if not unicodedata.combining(letter)
    )
