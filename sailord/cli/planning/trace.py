"""The commands ``trace ...``: traces of availability from published logs and sailord's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import click

from sailord.cli.shared.inputs import check_outputs
from sailord.cli.shared.options import FILE
from sailord.text.units import duration
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import load_catalogue
from simulator.traces.published import (
    UNITS,
    LogFile,
    Series,
    assumed_of,
    format_of,
    merged,
    read_points,
    series_of,
    trace_document,
)

_SKYPILOT_NAME = re.compile(r"(?P<zone>[a-z0-9-]+)_(?P<gpu>[a-z0-9]+)_(?P<gpus>\d+)")
_SKYPILOT_GPUS = {"v100": "V100-16", "a100": "A100-40"}


@click.group()
def trace() -> None:
    """Make traces for `replay`, from published logs and sailord's own."""


@trace.command("import")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="GPU@ZONE",
    help="Pool of a file that names none; one for each file, in their order.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    help="Default: 1; of SkyPilot's files, what their name says.",
)
@click.option(
    "--spot", is_flag=True, help="The GPUs of files that name no pool are those of spot pools."
)
@click.option(
    "--unit",
    type=click.Choice(list(UNITS)),
    help="Unit of the times in files that say none. Default: ms, if these cover an hour or are"
    " whole seconds.",
)
@click.option(
    "--names", is_flag=True, help="Keep the names of nodes; each is a machine of the cluster file."
)
@click.option("--save", type=FILE, metavar="TRACE", required=True, help="The trace to write.")
def import_(
    files: tuple[Path, ...],
    pools: tuple[str, ...],
    gpus_per_node: int | None,
    spot: bool,
    unit: str | None,
    names: bool,
    save: Path,
) -> None:
    """Write a trace from FILES, logs of which nodes were up.

    It reads Bamboo's events and counts, SkyPilot's JSON (one file per zone), Parcae's segments, and
    sailord's own availability.jsonl. Several files are merged, aligned at their starts; those of
    several leaders by their times. A trace counts what was up, not what could have been had.
    """
    check_outputs((save,), files)
    if pools and len(pools) != len(files):
        what = f"is given {len(pools)} times for {len(files)} files"
        raise InputError(Problem("--pool", what, "give it once for each file, in their order"))
    found: list[Series] = []
    assumed: list[str] = []
    own: list[LogFile] = []
    for number, path in enumerate(files):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise InputError(Problem(str(path), f"could not be read: {reason}", "")) from None
        pool, gpus = _pool_of(path, text, pools[number] if pools else None)
        size = gpus_per_node or gpus
        log = LogFile(path.name, text, f"{pool} spot" if spot else pool, size, unit)
        if format_of(log) == "sailord":
            read_points(log)  # So that an error names this file.
            own.append(log)
        else:
            found.append(series_of(log))
            what = assumed_of(log, found[-1])
            assumed.append(f"{path.name}: {duration(found[-1].end_s)}" + (what and f"; {what}"))
    if own:
        every = "\n".join(log.text for log in own)
        found.append(series_of(replace(own[0], text=every)))
    series = merged(found if names else [each.without_names() for each in found])
    source = ", ".join(path.name for path in files)
    document = trace_document(series, source, assumed)
    save.write_text(json.dumps(document) + "\n", encoding="utf-8")
    most = max(sum(counts.values()) for _, counts in series.points)
    changes = len(series.points) - 1
    told = f"{save}: {duration(series.end_s)}, {changes} changes, at most {most} GPUs"
    click.echo("\n".join([*assumed, told]))


def _pool_of(path: Path, text: str, given: str | None) -> tuple[str, int]:
    """The pool of a file and the GPUs of a node, as given or by the name of the file."""
    named = _SKYPILOT_NAME.fullmatch(path.stem)
    if given is not None:
        gpu, at, zone = given.partition("@")
        if not at or not gpu or not zone:
            raise InputError(Problem("--pool", f'is "{given}"', "write it as GPU@ZONE"))
        return f"{load_catalogue().gpu_name(gpu)}@{zone}", int(named["gpus"]) if named else 1
    if named is not None and named["gpu"] in _SKYPILOT_GPUS:
        return f"{_SKYPILOT_GPUS[named['gpu']]}@{named['zone']}", int(named["gpus"])
    if text.lstrip().startswith('{"at"'):
        return "", 1  # Lines of sailord's log name their pools.
    what = "does not say which GPUs it is about, nor where"
    raise InputError(Problem(str(path), what, "give --pool GPU@ZONE"))
