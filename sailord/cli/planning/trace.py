"""The commands ``trace ...``: traces of availability from published logs and sailord's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from sailord.cli.shared.inputs import check_outputs
from sailord.cli.shared.options import FILE
from sailord.text.units import counted, duration
from simulator.documents.files import read_bytes
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import load_catalogue
from simulator.traces.published import (
    UNITS,
    LogFile,
    Series,
    assumed_of,
    format_of,
    merged,
    own_lines,
    series_of,
    series_of_leaders,
    trace_document,
)
from simulator.traces.sailord_log import OLDER, damage_of, is_sailord_log

_SKYPILOT_NAME = re.compile(r"(?P<zone>[a-z0-9-]+)_(?P<gpu>[a-z0-9]+)_(?P<gpus>\d+)")
_POOL = re.compile(r"[^@\s]+@[^@\s]+")
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
    help="The GPUs and the zone that a file is about; one for each file that is not sailord's, in"
    " their order. SkyPilot's files tell it by their names.",
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
    sailord's own availability.jsonl, with the .1 beside it. Several files are merged, aligned at
    their starts; those of several leaders by their times. A trace counts what was up, not what
    could have been had.
    """
    check_outputs((save,), files)
    own: dict[Path, LogFile] = {}
    others: dict[Path, LogFile] = {}
    for path in files:
        if path in own or path in others:
            raise InputError(Problem(str(path), "is given twice", "name each file once"))
        log = LogFile(str(path), _text_of(path), "", 1, unit)
        (own if format_of(log) == "sailord" else others)[path] = log
    for older in [path.with_name(path.name + OLDER) for path in own]:
        if older.is_file():
            own[older] = LogFile(str(older), _text_of(older), "", 1, unit)
    if pools and len(pools) != len(others):
        what = (
            f"is given {counted(len(pools), 'time')}; {len(others)} of the files are not sailord's"
        )
        raise InputError(Problem("--pool", what, "give it once for each of these, in their order"))
    found: list[Series] = []
    assumed: list[str] = []
    for number, (path, read) in enumerate(others.items()):
        pool, gpus = _pool_of(path, pools[number] if pools else None)
        size = gpus_per_node or gpus or 1
        log = replace(read, pool=f"{pool} spot" if spot else pool, gpus_per_node=size)
        found.append(series_of(log))
        said = (
            f"{path.name}: {duration(found[-1].end_s)}",
            assumed_of(log, found[-1]),
            "" if gpus_per_node or gpus else "each node has 1 GPU (--gpus-per-node)",
        )
        assumed.append("; ".join(filter(None, said)))
    damage = [told for log in own.values() for told in damage_of(log.name, own_lines(log))]
    for warning in damage:
        click.echo(f"warning: {warning}", err=True)
    if own:
        found.append(series_of_leaders(list(own.values())))
    series = merged(found if names else [each.without_names() for each in found])
    if names:
        _check_names(series)
    source = ", ".join(path.name for path in (*files, *(path for path in own if path not in files)))
    document = trace_document(series, source, [*assumed, *damage])
    save.write_text(json.dumps(document) + "\n", encoding="utf-8")
    most = max(sum(counts.values()) for _, counts in series.points)
    changes = len(series.points) - 1
    told = f"{save}: {duration(series.end_s)}, {changes} changes, at most {most} GPUs"
    click.echo("\n".join([*assumed, told]))


def _text_of(path: Path) -> str:
    """Read a file; of sailord's logs damaged lines, too."""
    raw = read_bytes(path, name=str(path))
    if raw.startswith(b"\x1f\x8b"):
        raise InputError(Problem(str(path), "is compressed", "unpack it with gunzip first"))
    text = raw.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text and not is_sailord_log(text):
        raise InputError(Problem(str(path), "is not UTF-8 text", "save it as UTF-8 text"))
    return text


def _check_names(series: Series) -> None:
    """Refuse nodes of one name in several files about one pool."""
    for nodes in series.nodes:
        for pool, names in nodes.items():
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                what = f'finds several nodes "{twice[0]}" of {pool} in these files'
                cure = "leave it out, or give the files pools of their own"
                raise InputError(Problem("--names", what, cure))


def _pool_of(path: Path, given: str | None) -> tuple[str, int | None]:
    """The pool of a file and the GPUs of a node, as given or by the name of the file."""
    named = _SKYPILOT_NAME.fullmatch(path.stem)
    gpus = int(named["gpus"]) if named else None
    if given is not None:
        if not _POOL.fullmatch(given):
            cure = "write it as GPU@ZONE, for example V100-16@us-east-1c; spot is said by --spot"
            raise InputError(Problem("--pool", f'is "{given}"', cure))
        gpu, _, zone = given.partition("@")
        try:
            return f"{load_catalogue().gpu_name(gpu)}@{zone}", gpus
        except InputError as error:
            raise InputError([replace(each, place="--pool") for each in error.problems]) from None
    if named is not None and named["gpu"] in _SKYPILOT_GPUS:
        return f"{_SKYPILOT_GPUS[named['gpu']]}@{named['zone']}", gpus
    what = "does not say which GPUs it is about, nor where"
    raise InputError(Problem(str(path), what, "give --pool GPU@ZONE"))
