"""Read the [work] section: the packed folder of a script, and what its workers need besides."""

from __future__ import annotations

import re
from collections.abc import Callable

from simulator.documents.fields import InvalidValue, Table, open_table, quote, valid_text
from simulator.documents.files import Document
from simulator.documents.problems import Problems
from simulator.spec.job import Work

PACKAGE = re.compile(r"[0-9a-f]{64}-[1-9][0-9]{0,11}")
"""SHA-256 and size of a packed folder."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


def read_work(top: Table) -> Work | None:
    """Read [work]; ``None``: the job has none."""
    table = top.table("work")
    if table is None:
        return None
    work = Work(
        package=table.value("package", _package, default="", required=True),
        arguments=_texts(table, "arguments", _argument),
        setup=_texts(table, "setup", valid_text),
        secrets=_texts(table, "secrets", _variable),
    )
    table.finish()
    return work


def work_of(document: Document) -> Work | None:
    """Read [work] of a job file alone, which was checked when it was submitted."""
    return read_work(open_table(document, Problems()))


def _texts(table: Table, key: str, accept: Callable[[object], str]) -> tuple[str, ...]:
    def texts(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise InvalidValue(f"is {quote(value)}", "give a list of texts")
        return tuple(accept(each) for each in value)

    return table.value(key, texts, default=())


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
    return value
