"""The commands ``checkpoint ...`` that ask sailord: list, make, pin and roll back."""

from __future__ import annotations

import time
from typing import Any

import click

from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import show
from sailord.cli.shared.server import (
    ask_about,
    job_question,
    order_options,
    ordered_text,
    server_command,
)
from sailord.client import Client, ServerProblem, part, status_path
from sailord.text.checkpoint_text import checkpoints_text

WAIT_S = 0.2

ls = job_question("checkpoints", checkpoints_text, "List a job's checkpoints.", name="ls")


@click.command()
@click.argument("job", required=False)
@click.option("--wait/--no-wait", default=True, help="Wait until it is durable.", show_default=True)
@server_command
def now(client: Client, job: str | None, wait: bool, as_json: bool) -> None:
    """Make a durable checkpoint now, regardless of the interval.

    It is one of the last `keep` that are retained, so the oldest of them goes, unless it is pinned.
    Default JOB: the active one.
    """
    job, _ = ask_about(client, "job", job, lambda name: client.ask("GET", f"/v1/jobs/{name}"))
    mark = max((each["id"] for each in _events(client, 0)), default=0)
    before = client.ask("GET", f"/v1/jobs/{part(job)}/checkpoints")
    earlier, keep = before["trouble"], before["keep"]
    ordered = client.order(f"/v1/jobs/{part(job)}/checkpoint", {})
    if not wait:
        show(ordered, as_json, lambda _: f"checkpoint {job}: ordered")
        return
    reported: list[str] = []
    while (step := _find_settled_step(client, ordered["id"], mark)) is None:
        time.sleep(WAIT_S)
        state = client.ask("GET", f"/v1/jobs/{part(job)}/checkpoints")
        # What failed before may have been mended: the order is tried all the same.
        if state["trouble"] not in ("", None, earlier) or state["uri"] is None:
            click.echo(f"error: {state['trouble'] or checkpoints_text(state)}", err=True)
            raise SystemExit(FAILED)
        _expect_running(client, job)
        if (troubles := _troubles(client, job)) != reported:
            reported = troubles
            click.echo("\n".join(["still waiting", *troubles]), err=True)
    place = f"; it is one of the last {keep} that are kept" if keep else ""
    show({"job": job, "step": step}, as_json, lambda _: f"step {step} is durable{place}")


def _events(client: Client, after: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.ask("GET", f"/v1/events?follow=false&after={after}")[
        "events"
    ]
    return found


def _find_settled_step(client: Client, order: str, mark: int) -> int | None:
    """Return the step that is durable as ordered, as an event after ``mark`` tells.

    Raises if the order has failed; ``None``: it is not settled yet.
    """
    for event in _events(client, mark):
        if "settled" not in event:
            cure = "it is of an earlier version; see `sailorctl checkpoint ls`"
            raise ServerProblem(f"sailord does not say how the order ended: {cure}")
        settled = event["settled"]
        if settled is not None and order in settled["orders"]:
            if settled["step"] is None:
                raise ServerProblem(event["text"])
            return int(settled["step"])
    return None


def _expect_running(client: Client, job: str) -> None:
    """Raise if the job does not run, since it will make no further checkpoint."""
    found = client.ask("GET", f"/v1/jobs/{part(job)}")
    state, durable = found["state"], found["durable"]
    if state == "running":
        return
    durable_step = None if durable is None else durable["point"]["step"]
    newest = "none is durable" if durable_step is None else f"the newest is of step {durable_step}"
    raise ServerProblem(f"{job} is {state}, so no further checkpoint is made; {newest}")


def _troubles(client: Client, job: str) -> list[str]:
    try:
        found: list[str] = client.ask("GET", status_path(job))["job"]["troubles"]
    except ServerProblem:  # It has just stopped running; its state is asked next.
        return []
    return found


def _make_pin_command(order: str, about: str) -> click.Command:
    @click.command(order, help=about)
    @click.argument("job")
    @click.argument("step", type=click.IntRange(0))
    @server_command
    def command(client: Client, job: str, step: int, as_json: bool) -> None:
        path = f"/v1/jobs/{{}}/checkpoints/{step}/{order}"
        full, value = ask_about(
            client, "job", job, lambda name: client.ask("POST", path.format(name), {})
        )
        show(value, as_json, lambda _: f"step {step} of {full} is {order}ned")

    return command


pin = _make_pin_command("pin", "Keep a checkpoint, whatever the retention says.")
unpin = _make_pin_command("unpin", "Leave a checkpoint to the retention again.")


@click.command()
@click.argument("job")
@click.argument("step", type=click.IntRange(0))
@order_options
@server_command
def rollback(client: Client, job: str, step: int, order: dict[str, Any], as_json: bool) -> None:
    """Roll a job back to an older checkpoint; later steps are discarded."""
    path = f"/v1/jobs/{{}}/checkpoints/{step}/rollback"
    full, value = ask_about(
        client, "job", job, lambda name: client.order(path.format(name), order), is_order=True
    )
    show(value, as_json, lambda _: ordered_text(f"rollback of {full} to step {step}", value))
