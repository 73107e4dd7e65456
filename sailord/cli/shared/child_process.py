"""How a child process of a command ended."""

from __future__ import annotations

import signal

import click

from sailord.cli.shared.exit_codes import FAILED, INTERRUPTED


def killed_text(status: int) -> str:
    """Return what is known of a process that a signal killed, by its negative status."""
    return f"was killed by signal {-status} (often: out of memory)"


def expect_success(status: int) -> None:
    """End this command with its child's exit code, unless that is 0; the child told its errors.

    One that a signal killed could tell nothing, so that is told here.
    """
    if status == -signal.SIGINT:
        raise SystemExit(INTERRUPTED)
    if status < 0:
        click.echo(f"error: the process that did the work {killed_text(status)}", err=True)
        raise SystemExit(FAILED)
    if status:
        raise SystemExit(status)
