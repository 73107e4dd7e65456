"""Commands that talk to a running sailord: their options, and how its errors are printed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from sailord.cli.shared.exit_codes import FAILED, INTERRUPTED, UNUSABLE_INPUT
from sailord.cli.shared.options import JSON, show
from sailord.client import Client, ServerProblem, client_from, part
from sailord.text.printable import printable
from simulator.documents.problems import InputError, Problem

T = TypeVar("T")
GONE = ("done", "failed", "cancelled", "lost")
"""States of jobs that have ended, and of lost nodes."""
NAMES_MAX = 12
INVALID = 422
"""The HTTP status with which sailord refuses a request that is wrong in itself."""


def server_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--server``, ``--token-file``, ``--tls``, ``--insecure``, ``--json``; pass a client.

    Errors of the server are printed.
    """

    @click.option(
        "--server",
        metavar="URL",
        help="Address of sailord, unix:///PATH or https://HOST:PORT; default: SAILOR_SERVER, "
        "or the socket on this machine.",
    )
    @click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        envvar="SAILOR_TOKEN_FILE",
        help="File with the token for sailord over TCP; default: SAILOR_TOKEN_FILE.",
    )
    @click.option(
        "--tls",
        type=click.Path(path_type=Path),
        envvar="SAILOR_TLS",
        metavar="FOLDER",
        help="Your certificate, as `sailorctl ca issue` wrote it; default: SAILOR_TLS.",
    )
    @click.option(
        "--insecure",
        is_flag=True,
        envvar="SAILOR_INSECURE",
        help="Send the token in clear to another machine; default: SAILOR_INSECURE.",
    )
    @JSON
    @wraps(command)
    def wrapped(
        server: str | None,
        token_file: Path | None,
        tls: Path | None,
        insecure: bool,
        **kwargs: Any,
    ) -> None:
        try:
            command(client_from(server, token_file, tls, insecure=insecure), **kwargs)
        except ServerProblem as problem:
            for line in str(problem).splitlines():
                click.echo(f"error: {printable(line)}", err=True)
            raise SystemExit(UNUSABLE_INPUT if problem.status == INVALID else FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return wrapped


def order_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--reason`` and ``--id``, passed on as one ``order``: the body of the request."""

    @click.option("--reason", default="", help="Recorded in the job's history.")
    @click.option(
        *("--id", "id_"),
        metavar="ID",
        help="Idempotency key: an order with the same id takes effect once.",
    )
    @wraps(command)
    def wrapped(*args: Any, reason: str, id_: str | None, **kwargs: Any) -> None:
        command(*args, order={"reason": reason, "id": id_ or uuid.uuid4().hex}, **kwargs)

    return wrapped


def question(name: str, text_of: Callable[[Any], str], about: str) -> click.Command:
    """Make a command that prints what sailord answers at ``/v1/NAME``."""

    @click.command(name, help=about)
    @server_command
    def command(client: Client, as_json: bool) -> None:
        show(client.ask("GET", f"/v1/{name}"), as_json, text_of)

    return command


def job_question(
    document: str, text_of: Callable[[Any], str], about: str, *, name: str | None = None
) -> click.Command:
    """Make a command that prints one of the documents about a job."""

    @click.command(name or document, help=f"{about}\n\nDefault JOB: the active one.")
    @click.argument("job", required=False)
    @server_command
    def command(client: Client, job: str | None, as_json: bool) -> None:
        path = f"/v1/jobs/{{}}/{document}"
        _, answer = ask_about(client, "job", job, lambda name: client.ask("GET", path.format(name)))
        show(answer, as_json, text_of)

    return command


def ordered_text(order: str, answer: dict[str, Any]) -> str:
    """Return that an order was given, and what follows; an older sailord does not say that."""
    then = answer.get("then")
    return f"{order}: ordered{f'; {then}' if then else ''}"


def order_command(kind: str, name: str, about: str) -> click.Command:
    """Make a command that orders something for a ``job`` or a ``node``."""

    @click.command(name, help=about)
    @click.argument("target", metavar=kind.upper())
    @order_options
    @server_command
    def command(client: Client, target: str, order: dict[str, Any], as_json: bool) -> None:
        path = f"/v1/{kind}s/{{}}/{name}"
        full, answer = ask_about(
            client, kind, target, lambda each: client.order(path.format(each), order), is_order=True
        )
        show(answer, as_json, lambda _: ordered_text(f"{name} {full}", answer))

    return command


def ask_about(
    client: Client, kind: str, name: str | None, ask: Callable[[str], T], *, is_order: bool = False
) -> tuple[str, T]:
    """Ask about a job or node by its name or the beginning of it; return its full name, too.

    ``ask`` gets the name as a part of a path. Without a name it asks about the active job. An order
    for ``a1`` is none for ``a10``, and one for ``a`` none for ``a1`` as long as a lost ``a2`` or an
    ended job of such a name is known.
    """
    name = active_job(client) if name is None else name
    if not name:
        cure = f"name a {kind}; is a variable of your shell unset?"
        raise InputError(Problem(kind.upper(), "is empty", cure))
    try:
        return name, ask(part(name))
    except ServerProblem as problem:
        if problem.status not in (404, 409):
            raise
        known = client.ask("GET", f"/v1/{kind}s")
        gone = known.get("lost", ()) if is_order else ()  # An older sailord does not say it.
        full = _begins_with(known[f"{kind}s"], kind, name, gone, is_order=is_order)
        if full is None:
            raise
        if is_order and name[-1].isdigit() and full[len(name)].isdigit():
            what = f"{name}: there is no such {kind}; an order for {full} must name it in full"
            raise ServerProblem(what, 404) from None
    return full, ask(part(full))


def _begins_with(
    listed: list[dict[str, Any]], kind: str, name: str, gone: Iterable[str], *, is_order: bool
) -> str | None:
    """Return the only name with this beginning; to a question, of several the only one that has not
    ended. ``gone``: names that are not listed any more."""
    key = {"job": "id", "node": "name"}[kind]
    begin = [each for each in listed if each[key].startswith(name)]
    found = {str(each[key]) for each in begin}
    if name in found or not found:
        return None
    # A node that was lost and came back is listed twice.
    live = {str(each[key]) for each in begin if each["state"] not in GONE}
    found |= {each for each in gone if each.startswith(name)}
    for candidates in (found,) if is_order else (found, live):
        if len(candidates) == 1:
            return candidates.pop()
    names = ", ".join(sorted(found)[:NAMES_MAX])
    raise ServerProblem(f"{name}: several {kind}s begin so; name one: {names}", 404)


def active_job(client: Client) -> str:
    """Return the id of the job that is meant where none is named.

    That is the one that has the cluster, else the only one that has not ended, else the only one.
    """
    active = client.ask("GET", "/v1/status")["job"]
    if active is not None:
        return str(active["id"])
    jobs = client.ask("GET", "/v1/jobs")["jobs"]
    for found in ([each for each in jobs if each["state"] not in GONE], jobs):
        if len(found) == 1:
            return str(found[0]["id"])
    raise ServerProblem("no job is active; name one (sailorctl jobs lists all)")


def report_outage(problem: ServerProblem) -> None:
    """Say on stderr that sailord does not answer while a command follows its output."""
    click.echo(f"waiting: {problem}", err=True)
