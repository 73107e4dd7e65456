"""Submits scripts: packs and uploads their folders."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import click

from agents.work.package import Package, package_of, read_part
from sailord.cli.shared.described_job import JobFile
from sailord.cli.shared.server import report_outage
from sailord.cli.submit.work_folder import left_behind, megabytes, pack_files, select
from sailord.client import Client, Reconnector, part
from sailord.text.units import counted
from simulator.documents.fields import InvalidValue, quote, toml_value
from simulator.documents.problems import InputError, Problem, Problems
from simulator.inputs.work_section import check_mount


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """What is given beside the script, its arguments and its folder."""

    setup: tuple[str, ...]
    secrets: tuple[str, ...]
    mounts: tuple[str, ...]
    checkpoint: str | None
    allow: tuple[str, ...] = ()


def submitted_script(client: Client, job: JobFile, options: ScriptOptions) -> str:
    """Upload the script's folder, and return its job."""
    script, root = job.path, job.root()
    mounts = _mounts(options.mounts)
    # First, since a folder that is too large is refused at once.
    selection = select(root, mounts=mounts)
    inner = str(script.resolve().relative_to(root))
    if inner not in selection.names:
        what = "is left out of its folder by .gitignore"
        raise InputError(Problem(str(script), what, f"add a line there: !{script.name}"))
    untold = left_behind(root, selection, mounts=mounts)
    if untold:
        others = f" and {len(untold) - 1} more" if len(untold) > 1 else ""
        what = f"git tracks {untold[0]}{others}, and .gitignore leaves that out of what is packed"
        click.echo(f"note: {what}; change .gitignore if nodes need it", err=True)
    described = job.described()
    text = described.text
    # What the script has written meanwhile does not travel either.
    selection = selection.without(root, described.outputs)
    with tempfile.NamedTemporaryFile() as packed:
        pack_files(root, selection, packed)
        package = package_of(Path(packed.name))
        said = f"{counted(len(selection.names), 'file')}, {megabytes(selection.bytes)}"
        click.echo(f"packed {root}: {said}, package {package.sha256[:12]}", err=True)
        _upload(client, package, Path(packed.name))
    work = {
        "package": str(package),
        "arguments": list(job.arguments),
        "setup": list(options.setup),
        "secrets": list(options.secrets),
    }
    text += section("work", work)
    if mounts:
        text += section("data.mounts", mounts)
    if options.allow:
        text += section("objective", {"allow": list(options.allow)})
    if options.checkpoint is None:
        what = "without --checkpoint the weights are lost when the job ends"
        click.echo(f"note: {what}, or all its nodes are lost", err=True)
    else:
        text += section("checkpoint", {"uri": options.checkpoint})
    return text


def section(name: str, values: Mapping[str, object]) -> str:
    """Return a section of a job file."""
    lines = [f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, "", ""])


def _mounts(given: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=WHERE``; ``InputError`` lists all mistakes."""
    problems, found = Problems(), {}
    for text in given:
        name, equals, where = text.partition("=")
        try:
            if not equals:
                raise InvalidValue(
                    f"is {quote(text)}", "write NAME=PATH or NAME=gs://BUCKET/FOLDER"
                )
            check_mount(name, where)
        except InvalidValue as fault:
            problems.add("--mount", fault.what, fault.cure)
        found[str(PurePosixPath(name))] = where
    problems.raise_if_any()
    return found


def _upload(client: Client, package: Package, path: Path) -> None:
    """Send the slices of a package that sailord does not have."""
    place = f"/v1/packages/{part(str(package))}"
    reconnector = Reconnector(report_outage)
    reconnector.answered()  # sailord answered earlier requests: its address is right.
    for number in client.ask("GET", place)["missing"]:
        send = partial(client.ask, "PUT", f"{place}/{number}", read_part(path, number))
        reconnector.insist(send)
