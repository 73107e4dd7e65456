"""The commands that ask a running sailord, or tell it something."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from sailord.cli.errors import Finite
from sailord.client import Client, Patience, ServerProblem, client_from, part
from sailord.text import cluster_text as text
from sailord.text.capacity_text import capacity_text, glance_problems
from simulator.documents.files import read_bytes
from simulator.documents.problems import InputError, Problem

FAILED = 1
WATCH_S = 1.0
STILL_THERE_S = 60.0
"""So long after its moment, a node that was to go away seems to stay."""


def online(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the server's options, and tell what the server says in sentences."""

    @click.option(
        "--server",
        metavar="URL",
        help="unix:///PATH or http://HOST:PORT of sailord; else SAILOR_SERVER, or this machine's.",
    )
    @click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        envvar="SAILOR_TOKEN_FILE",
        help="A file with the token that sailord asks for over TCP; or SAILOR_TOKEN_FILE.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
    @wraps(command)
    def wrapped(server: str | None, token_file: Path | None, **kwargs: Any) -> None:
        try:
            command(client_from(server, token_file), **kwargs)
        except ServerProblem as problem:
            for line in str(problem).splitlines():
                click.echo(f"error: {line}", err=True)
            raise SystemExit(FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return wrapped


def show(value: Any, as_json: bool, told: Callable[[Any], str]) -> None:
    """Print what the server said, for a person or a program."""
    click.echo(json.dumps(value, indent=1) if as_json else told(value))


@click.command()
@click.option(
    "-w", "--watch", is_flag=True, help="Show it again and again; with --json, a line each time."
)
@online
def status(client: Client, watch: bool, as_json: bool) -> None:
    """Show the job, its plan, and the nodes at a glance."""
    if not watch:
        show(client.ask("GET", "/v1/status"), as_json, text.status_text)
        return

    def tell(told: str) -> None:
        if not as_json:
            click.clear()
        click.echo(told)
        sys.stdout.flush()

    def tell_away(problem: ServerProblem) -> None:
        tell(json.dumps({"error": str(problem)}) if as_json else f"error: {problem}")

    patience = Patience(tell_away)
    while True:
        value = patience.insist(lambda: client.ask("GET", "/v1/status"))
        tell(json.dumps(value) if as_json else text.status_text(value))
        time.sleep(WATCH_S)


@click.command()
@online
def nodes(client: Client, as_json: bool) -> None:
    """List all nodes."""
    show(client.ask("GET", "/v1/nodes"), as_json, lambda v: text.nodes_text(v["nodes"]))


@click.command()
@online
def capacity(client: Client, as_json: bool) -> None:
    """Show rented machines: what is there, wanted and on its way, and why others are not."""
    show(client.ask("GET", "/v1/capacity"), as_json, capacity_text)


@click.command()
@online
def jobs(client: Client, as_json: bool) -> None:
    """List all jobs."""
    show(client.ask("GET", "/v1/jobs"), as_json, lambda v: text.jobs_text(v["jobs"]))


@click.command()
@click.argument("job", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--id", "id_", metavar="NAME", help="The job's name; else one is made for it.")
@click.option("--priority", type=int, default=0, show_default=True, help="Higher goes first.")
@click.option(
    "--resume", metavar="STEP", help='Go on from the checkpoint of this step, or of the "newest".'
)
@online
def submit(
    client: Client, job: Path, id_: str | None, priority: int, resume: str | None, as_json: bool
) -> None:
    """Put the job of FILE into the queue.

    It stands by itself: what it names besides its data, it must hold (docs/formats.md). Files of
    data are looked up on the nodes.
    """
    try:
        spec = read_bytes(job, name=str(job)).decode()
    except UnicodeDecodeError:
        raise InputError(Problem(str(job), "is not UTF-8")) from None
    given = {"id": id_, "resume": resume}
    body = {"job": spec, "priority": priority, **{k: v for k, v in given.items() if v is not None}}
    try:
        queued = client.ask("POST", "/v1/jobs", body)
    except ServerProblem as problem:
        raise problem.about("job", str(job)) from None
    show(queued, as_json, lambda v: f"{v['id']} is queued")
    # A sailord that is older than this command has no doubts.
    for warning in queued.get("warnings", ()):
        click.echo(f"warning: {warning}", err=True)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as things happen.")
@online
def events(client: Client, follow: bool, as_json: bool) -> None:
    """Tell what happened of late, in the whole cluster."""
    tell = json.dumps if as_json else text.happening_text
    patience = Patience(_tell_away)

    def ask() -> Any:
        return client.ask("GET", "/v1/events?follow=false")

    found = (patience.insist(ask) if follow else ask())["events"]
    for happening in found:
        click.echo(tell(happening))
    if follow:
        sys.stdout.flush()
        for happening in client.follow(found[-1]["id"] if found else 0, patience):
            click.echo(tell(happening))
            sys.stdout.flush()


def _tell_away(problem: ServerProblem) -> None:
    """To a person who follows; what is printed stays what happened."""
    click.echo(f"waiting: {problem}", err=True)


def active_job(client: Client) -> str:
    """The job that is meant where none is named."""
    active = client.ask("GET", "/v1/status")["job"]
    if active is None:
        raise ServerProblem("no job has the cluster; name one (sailorctl jobs lists all)")
    return str(active["id"])


@click.command()
@click.argument("job", required=False)
@online
def history(client: Client, job: str | None, as_json: bool) -> None:
    """Tell a job's transitions, each with its reason.

    Without JOB: of the job that has the cluster.
    """
    job = job or active_job(client)
    value = client.ask("GET", f"/v1/jobs/{part(job)}/history")
    show(value, as_json, text.history_text)


@click.command()
@click.argument("job", required=False)
@online
def moves(client: Client, job: str | None, as_json: bool) -> None:
    """Tell what each move to another generation took, beside what was predicted.

    Without JOB: of the job that has the cluster.
    """
    job = job or active_job(client)
    value = client.ask("GET", f"/v1/jobs/{part(job)}/moves")
    show(value, as_json, lambda _: text.moves_text(value["moves"]))


@click.command()
@click.argument("job", required=False)
@online
def why(client: Client, job: str | None, as_json: bool) -> None:
    """Say why a job is where it is.

    Without JOB: of the job that has the cluster.
    """
    job = job or active_job(client)
    show(client.ask("GET", f"/v1/jobs/{part(job)}/why"), as_json, text.why_text)


@click.command()
@click.argument("node")
@click.option("--rank", type=click.IntRange(0, 99_999), metavar="N", help="Of one worker only.")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is written.")
@online
def logs(client: Client, node: str, rank: int | None, follow: bool, as_json: bool) -> None:
    """Show the end of what a node's workers wrote."""
    mark, patience = "", Patience(_tell_away)

    def ask() -> tuple[str, str]:
        return client.log(node, rank, mark)

    while True:
        fresh, mark = patience.insist(ask) if follow else ask()
        if fresh:
            line = json.dumps({"node": node, "text": fresh}) + "\n"
            click.echo(line if as_json else fresh, nl=False)
        if not follow:
            return
        sys.stdout.flush()
        if not fresh:
            time.sleep(1.0)


def _orders(kind: str, names: dict[str, str]) -> list[click.Command]:
    return [_order(kind, name, about) for name, about in names.items()]


def _order(kind: str, name: str, about: str) -> click.Command:
    @click.command(name, help=about)
    @click.argument("target", metavar=kind.upper())
    @click.option("--reason", default="", help="Stands in the history.")
    @click.option("--id", "id_", help="The same id has one effect only.")
    @online
    def order(client: Client, target: str, reason: str, id_: str | None, as_json: bool) -> None:
        body = {"reason": reason} | ({} if id_ is None else {"id": id_})
        answer = client.ask("POST", f"/v1/{kind}s/{part(target)}/{name}", body)
        show(answer, as_json, lambda _: f"{name} {target}: ordered")

    return order


@click.command()
@click.argument("node")
@click.option("--notice", "notice_s", type=Finite(0.0, 86_400.0), help="Seconds until it goes.")
@click.option("--reason", default="", help="Stands in the history.")
@click.option("--id", "id_", help="The same id has one effect only.")
@online
def preempt(
    client: Client, node: str, notice_s: float | None, reason: str, id_: str | None, as_json: bool
) -> None:
    """Say that a node will be taken away, as a cloud's notice would.

    The job moves off it in time; `withdraw` takes it back.
    """
    body: dict[str, Any] = {"reason": reason} | ({} if id_ is None else {"id": id_})
    told = f"{node} will be taken away"
    if notice_s is not None:
        body["leaves_at"] = time.time() + notice_s
        told += f" in {text.span(notice_s)}"
    answer = client.ask("POST", f"/v1/nodes/{part(node)}/preempt", body)
    show(answer, as_json, lambda _: told)


@click.command()
@online
def doctor(client: Client, as_json: bool) -> None:
    """Look for what is wrong, and say what would help. Exits with 1 if something is."""
    value = client.ask("GET", "/v1/status")
    found = []
    if not value["store"]["answers"]:
        said = value["store"].get("trouble")
        cure = "see whether it runs and can be reached from the leader"
        found.append(f"the store is away{f' ({said})' if said else ''}; {cure}")
    elif said := value["store"].get("trouble"):
        found.append(f"the store refuses what sailord writes, and all waits for it: {said}")
    if value["leader"] is None:
        found.append("nobody leads; see the logs of each sailord")
    job = value["job"]
    if job is not None and job["state"] == "held":
        cure = f"sailorctl resume {job['id']}"
        found.append(f"{job['id']} is on hold: {job['phase']['reason']}; then {cure}")
    elif job is not None and job["phase"]["name"] == "waiting":
        found.append(f"{job['id']} waits: {job['phase']['reason']}")
    if job is not None and job["storage_trouble"]:
        found.append(f"checkpoints are not made: {job['storage_trouble']}")
    there = client.ask("GET", "/v1/nodes")["nodes"]
    found += [
        f"{n['name']} is {n['state']}" + (f": {n['failure']}" if n["failure"] else "")
        for n in there
        if n["state"] in ("suspect", "lost") or n["failure"]
    ]
    found += [
        f"{n['name']}: {n['trouble']}" for n in there if n["trouble"] and n["state"] != "lost"
    ]
    found += [
        f"{n['name']} was to go away {text.span(value['at'] - n['leaves_at'])} ago and is still "
        f"there; sailorctl withdraw {n['name']} lets plans use it again"
        for n in there
        if n["state"] != "lost" and value["at"] - (n["leaves_at"] or value["at"]) > STILL_THERE_S
    ]
    found += [f"no webhook reaches {each}" for each in value.get("unheard", ())]
    found += glance_problems(value.get("capacity"))
    if not value["nodes"]:
        found.append("no node is there; start sailor-agent on one")
    show({"problems": found}, as_json, lambda v: "\n".join(v["problems"]) or "all is well")
    if found:
        raise SystemExit(FAILED)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete our commands."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only here

    kind = get_completion_class(shell)
    assert kind is not None
    main = click.get_current_context().find_root().command
    click.echo(kind(main, {}, "sailorctl", "_SAILORCTL_COMPLETE").source())


COMMANDS: tuple[click.Command, ...] = (
    status,
    nodes,
    capacity,
    jobs,
    submit,
    events,
    history,
    moves,
    why,
    logs,
    doctor,
    completion,
    *_orders(
        "job",
        {
            "cancel": "End a job for good. Its checkpoints stay where they are.",
            "pause": "Park a job at the end of a step, and let the next one have the cluster.",
            "resume": "Let a job go on that is paused or on hold.",
        },
    ),
    *_orders(
        "node",
        {
            "drain": "Move the job off a node, with nothing lost.\n\n"
            "`nodes` says when it is safe to stop; `withdraw` takes it back.",
            "cordon": "Let no new plan use a node; what runs there goes on.",
            "uncordon": "Let plans use a node again.",
            "withdraw": "Take back a drain or a notice: the node stays after all.",
        },
    ),
    preempt,
)
