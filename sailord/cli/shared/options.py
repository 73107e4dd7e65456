"""Options and output that several commands share."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sailord.text.printable import printable
from sailord.text.wrap import wrapped

FILE = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class FiniteRange(click.FloatRange):
    """A range of numbers that refuses NaN and infinity."""

    name = "number"  # As click's messages call it.

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def show(value: Any, as_json: bool, text_of: Callable[[Any], str]) -> None:
    """Print a value as indented JSON for a program, or as text for a person.

    On a terminal, text is broken to its width.
    """
    if as_json:
        click.echo(json.dumps(value, indent=1, allow_nan=False))
        return
    text = printable(text_of(value))
    if sys.stdout.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    click.echo(text)


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, allow_nan=False)
