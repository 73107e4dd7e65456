"""Reads request bodies: JSON objects with known keys, each of a given type."""

from __future__ import annotations

import json
import sys
from typing import Any

from aiohttp import web

from agents.protocol.names import JOB_ID
from agents.rpc.unsigned_bodies import read_in_time
from simulator.documents.fields import quote
from simulator.documents.problems import InputError, Problem

ID_CURE = "use letters, digits, dots and hyphens"
MOMENT_MAX = 4e9
NUMBER_MAX = sys.float_info.max
PROBLEMS_MAX = 50
KINDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false"
}  # fmt: skip


def check_id(id_: str, place: str) -> None:
    """Raise ``InputError`` unless the id is one that a key of the store can hold."""
    if not JOB_ID.match(id_):
        raise InputError(Problem(place, "invalid id", ID_CURE))


def check_moment(moment: float | None, place: str) -> None:
    """Raise ``InputError`` unless the moment is plausible."""
    if moment is not None and not 0 < moment < MOMENT_MAX:
        raise InputError(Problem(place, "invalid time", "give seconds since 1970"))


async def read_object(
    request: web.Request, kinds: dict[str, type], required: tuple[str, ...]
) -> dict[str, Any]:
    """Read a JSON object with these keys and no others; an empty body is an empty object."""
    raw = await read_in_time(request)
    try:
        value = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        why = error if is_syntax else "not text, or nested too deeply"
        raise InputError(Problem("body", f"is not valid JSON: {why}", "send { ... }")) from None
    if not isinstance(value, dict):
        raise InputError(Problem("body", "is not a JSON object", "send { ... }"))
    problems = [
        Problem(f"body: {key[:40]}", "unknown key", f"known are {', '.join(kinds)}")
        for key in value
        if key not in kinds
    ]
    for key, kind in kinds.items():
        if key not in value:
            if key in required:
                problems.append(Problem(f"body: {key}", "is missing", f"give {KINDS[kind]}"))
            continue
        is_number = kind is float and type(value[key]) in (int, float)
        if type(value[key]) is not kind and not is_number:
            what = f"is {quote(value[key])}"
            problems.append(Problem(f"body: {key}", what, f"give {KINDS[kind]}"))
        elif is_number and not abs(value[key]) <= NUMBER_MAX:
            problems.append(Problem(f"body: {key}", "is out of range", "give a finite number"))
        elif kind is str and not _is_clean(value[key]):
            what = "contains a NUL or an unpaired surrogate"
            problems.append(Problem(f"body: {key}", what, "remove it"))
    if problems:
        raise InputError(problems[:PROBLEMS_MAX])
    return value


def _is_clean(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
