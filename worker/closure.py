"""Reads the variables of outer functions that a function uses."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def closure_values(function: FunctionType) -> dict[str, Any]:
    """Return the variables in the function's closure by name; ``None``: not set yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: _read(cell) for name, cell in cells}


def _read(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # It is not set yet.
