"""Reads the [work] section: the packed folder of a script, and what its workers need besides."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from simulator.documents.fields import InvalidValue, Table, open_table, quote, valid_text
from simulator.documents.files import Document
from simulator.documents.problems import Problems
from simulator.spec.job import Work

PACKAGE = re.compile(r"[0-9a-f]{64}-[1-9][0-9]{0,11}")
"""SHA-256 and size of a packed folder."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_OF_PROGRAMS = re.compile(
    r"(BASH_|DYLD_|GIT_|LD_|PYTHON|SAILOR_).*|BASHOPTS|ENV|HOME|IFS|PATH|SHELL|SHELLOPTS"
    r"|TMPDIR|VIRTUAL_ENV"
)
"""Variables that change how programs run."""


def read_work(top: Table, data: Table) -> Work | None:
    """Read [work] and the mounts of [data]; ``None``: the job has no work folder.

    That of a job without a script has nothing but its mounts.
    """
    table = top.table("work")
    mounts = data.value("mounts", _mounts, default=())
    if table is None:
        return Work(package="", mounts=mounts) if mounts else None
    work = Work(
        package=table.value("package", _package, default="", required=True),
        arguments=_texts(table, "arguments", _argument),
        setup=_texts(table, "setup", valid_text),
        secrets=_texts(table, "secrets", _variable),
        mounts=mounts,
    )
    table.finish()
    return work


def work_of(document: Document) -> Work | None:
    """Read [work] of a job file alone, which was checked when it was submitted."""
    top = open_table(document, Problems())
    return read_work(top, top.section("data"))


def _texts(table: Table, key: str, accept: Callable[[object], str]) -> tuple[str, ...]:
    def texts(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise InvalidValue(f"is {quote(value)}", "give a list of texts")
        return tuple(accept(each) for each in value)

    return table.value(key, texts, default=())


def _mounts(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise InvalidValue(f"is {quote(value)}", 'give a table, such as {data = "/mnt/data"}')
    for name, where in value.items():
        check_mount(name, where)
        above = {str(each) for each in PurePosixPath(name).parents}
        outer = next((each for each in value if str(PurePosixPath(each)) in above), None)
        if outer is not None:
            what = f"has {quote(name)} below {quote(outer)}"
            raise InvalidValue(what, "mount them at separate places")
    return tuple(sorted(value.items()))


def check_mount(name: str, where: object) -> None:
    """Raise ``InvalidValue`` unless a mount has a name within the folder, and leads somewhere."""
    place = PurePosixPath(name)
    if place.is_absolute() or not place.parts or ".." in place.parts:
        raise InvalidValue(f"has the name {quote(name)}", "name a place within the work folder")
    if not isinstance(where, str) or not ("://" in where or where.startswith("/")):
        cure = "give an absolute path on the nodes, or an address such as gs://bucket/folder"
        raise InvalidValue(f"has {quote(name)} at {quote(where)}", cure)


def _package(value: object) -> str:
    if not isinstance(value, str) or not PACKAGE.fullmatch(value):
        cure = "submit the script itself, which packs its folder: sailorctl submit train.py"
        raise InvalidValue(f"is {quote(value)}", cure)
    return value


def _argument(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"contains {quote(value)}", "give a list of texts")
    return value


def _variable(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise InvalidValue(f"contains {quote(value)}", "name environment variables")
    if _OF_PROGRAMS.fullmatch(value):
        what = f"contains {quote(value)}, which changes how programs run"
        raise InvalidValue(what, "give the secret another name")
    return value
