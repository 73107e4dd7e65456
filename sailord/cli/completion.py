"""The command ``completion``: a script that completes ``sailorctl`` in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    main = click.get_current_context().find_root().command
    click.echo(kind(main, {}, "sailorctl", "_SAILORCTL_COMPLETE").source())
