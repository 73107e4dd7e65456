"""Commands that talk to a running sailord: their options, and how its errors are printed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from sailord.cli.exit_codes import FAILED, INTERRUPTED
from sailord.cli.options import JSON
from sailord.client import Client, ServerProblem, client_from, part


def server_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--server``, ``--token-file`` and ``--json``; pass a client; print server errors."""

    @click.option(
        "--server",
        metavar="URL",
        help="Address of sailord, unix:///PATH or http://HOST:PORT; default: SAILOR_SERVER, "
        "or the socket on this machine.",
    )
    @click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        envvar="SAILOR_TOKEN_FILE",
        help="File with the token for sailord over TCP; default: SAILOR_TOKEN_FILE.",
    )
    @JSON
    @wraps(command)
    def wrapped(server: str | None, token_file: Path | None, **kwargs: Any) -> None:
        try:
            command(client_from(server, token_file), **kwargs)
        except ServerProblem as problem:
            for line in str(problem).splitlines():
                click.echo(f"error: {line}", err=True)
            raise SystemExit(FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return wrapped


def order_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--reason`` and ``--id``, passed on as one ``order``: the body of the request."""

    @click.option("--reason", default="", help="Recorded in the job's history.")
    @click.option("--id", "id_", metavar="ID", help="Idempotency key.")
    @wraps(command)
    def wrapped(*args: Any, reason: str, id_: str | None, **kwargs: Any) -> None:
        order = {"reason": reason} | ({} if id_ is None else {"id": id_})
        command(*args, order=order, **kwargs)

    return wrapped


def active_job(client: Client) -> str:
    """Return the id of the job that runs on the cluster: the default where no job is named."""
    active = client.ask("GET", "/v1/status")["job"]
    if active is None:
        raise ServerProblem("no job is active; name one (sailorctl jobs lists all)")
    return str(active["id"])


def about_job(client: Client, job: str | None, what: str) -> Any:
    """Read one of the documents about a job; without a name, about the active job."""
    return client.ask("GET", f"/v1/jobs/{part(job or active_job(client))}/{what}")


def report_outage(problem: ServerProblem) -> None:
    """Say on stderr that sailord does not answer while a command follows its output."""
    click.echo(f"waiting: {problem}", err=True)
