"""A click group that imports a command's module when that command runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from sailord.cli.shared.errors import Group

Sections = Mapping[str, Mapping[str, tuple[str, str]]]
"""By heading: each command's module within ``sailord.cli``, which defines it under its own name
(or ``module:name``), and the summary that the list of commands prints."""


class LazyGroup(Group):
    """Imports a command when it is used; ``--help`` prints the summaries of its table."""

    def __init__(self, *args: Any, sections: Sections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.entries = {name: entry for part in sections.values() for name, entry in part.items()}

    def list_commands(self, _: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.entries:
            return None
        target = self.entries[cmd_name][0].partition(":")
        command = getattr(import_module(f"sailord.cli.{target[0]}"), target[2] or cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, entries in self.sections.items():
            with formatter.section(heading):
                rows = [(name, summary) for name, (_, summary) in entries.items()]
                formatter.write_dl(rows, col_max=12)
