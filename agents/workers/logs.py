"""Reads the output of workers: its end, or what was written since the last request.

A mark says how far each process was read: ``RANK:PROCESS:OFFSET``, separated by commas. If another
process has taken over a rank since, its output is read from the beginning.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.protocol.records import Output, OutputPart
from agents.workers.process import describe_exit
from worker.plain_file import open_plain

BYTES_MAX = 1 << 18
"""Of all ranks together, in one answer."""
MARK = re.compile(r"(?:[0-9]{1,5}:[A-Za-z0-9._-]{1,200}:[0-9]{1,15}(?:,(?!\Z)|\Z))*\Z", re.ASCII)


def read_output(outputs: Mapping[int, Path], rank: int | None, mark: str) -> Output:
    """Read the output of one rank or of all: after the mark, or the last lines if there is none."""
    wanted = sorted(each for each in outputs if rank is None or each == rank)
    marked = (each.split(":") for each in mark.split(",") if each)
    known = {(int(rank), process): int(offset) for rank, process, offset in marked}
    parts, marks = [], []
    for each in wanted:
        path = outputs[each]
        process = path.parent.name
        begin = known.get((each, process), 0) if mark else None
        text, end = _read(path, begin, BYTES_MAX // len(wanted))
        marks.append(f"{each}:{process}:{end}")
        if text:
            parts.append(OutputPart(each, text))
    return Output(tuple(sorted(outputs)), tuple(parts), ",".join(marks))


def read_ended(homes: Sequence[Path]) -> Output:
    """Read the last lines of processes that have ended, each under a line that says which it was.

    ``homes``: their folders.
    """
    parts = []
    for home in homes:
        job, generation, rank = home.name.rsplit(".", 2)
        text, _ = _read(home / "output", None, BYTES_MAX // len(homes))
        how = f"rank {rank} of {job}, begun in generation {generation}, {describe_exit(home)}"
        parts.append(OutputPart(int(rank), f"==> {how} <==\n{text}"))
    return Output((), tuple(parts), "", len(parts))


def _read(path: Path, begin: int | None, size: int) -> tuple[str, int]:
    """Return the text from ``begin`` on, or the last lines, and the offset where it ends.

    An incomplete character at the end is left for the next request.
    """
    try:
        with open_plain(path) as file:
            end = file.seek(0, os.SEEK_END)
            if begin is not None and begin > end:
                begin = 0  # The file was made anew.
            first = max(0, end - size) if begin is None else begin
            with contextlib.suppress(OSError):  # No data follows.
                first = file.seek(first, os.SEEK_DATA)
            file.seek(first)
            data = file.read(size)
    except FileNotFoundError:
        return "", 0  # The file may come back, as when a setup is tried again.
    except OSError:
        return "", begin or 0
    if begin is None and first > 0:  # Drop the part of a line.
        cut = data.find(b"\n") + 1
        first, data = first + cut, data[cut:]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, first + len(data) - len(decoder.getstate()[0])
