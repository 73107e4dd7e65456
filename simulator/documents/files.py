"""Reads TOML and JSON files into plain values; the content decides the syntax, not the suffix."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from simulator.documents.problems import InputError, Problem, Problems, nearest

FILE_BYTES_MAX = 32 * 2**20
"""Far above any plan, profile or network file, so a larger one was named by mistake."""
TOML_BYTES_MAX = 2 * 2**20
"""The TOML parser is slow, so that larger files would seem to hang."""

_LINE_AND_COLUMN = re.compile(r"^(?P<what>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)$")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}\Z")
_AT_END = " (at end of document)"
_MISTAKES_SHOWN_MAX = 50
_DEPTH_MAX = 32

Where = tuple[str | int, ...]
"""The path of a value in a file: keys of tables and indexes of lists."""


@dataclass(frozen=True, slots=True)
class Document:
    """The values of one file, and the name under which its mistakes are reported."""

    name: str
    data: dict[str, Any]
    syntax: Literal["toml", "json"] = "json"
    folder: Path = Path()
    """Paths inside the file are relative to this."""
    flaws: tuple[Problem, ...] = ()
    """Values that the syntax allows and Sailor rejects, such as NaN and repeated keys."""

    def place(self, path: Where = (), *, is_table: bool = False) -> str:
        """Return the place of a value, written in the file's own syntax."""
        inner = toml_place(path, is_table) if self.syntax == "toml" else json_place(path)
        return f"{self.name}: {inner}" if inner else self.name


def json_place(path: Where) -> str:
    """Write a path as ``pipelines[2].stages[0].layers``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _BARE_KEY.match(part) else json.dumps(part[:60])
            text += f".{shown}" if text else shown
    return text


def toml_place(path: Where, is_table: bool) -> str:
    """Write a path as ``[training] global_batch`` or, in a list, ``[[pool]] 2: zone``."""
    if is_table:
        if len(path) == 2 and isinstance(path[1], int):
            return f"[[{path[0]}]] {path[1] + 1}"
        return f"[{json_place(path)}]" if path else ""
    split_at = len(path) - 1
    while split_at > 0 and isinstance(path[split_at], int):
        split_at -= 1
    table, leaf = path[:split_at], json_place(path[split_at:])
    if not table:
        return leaf
    separator = ": " if isinstance(table[-1], int) else " "
    return f"{toml_place(table, True)}{separator}{leaf}"


def load_document(
    path: Path | str, *, name: str | None = None, flaws_raise: bool = True
) -> Document:
    """Read a TOML or JSON file; raise ``InputError`` if its syntax is wrong.

    A caller that reads the values with a ``Table`` passes ``flaws_raise=False``, so that flaws
    and wrong values are reported together.
    """
    path = Path(path)
    shown = name if name is not None else path.name or str(path)
    raw = read_bytes(path, name=shown)
    return parse_document(raw, name=shown, folder=path.parent, flaws_raise=flaws_raise)


def built_in_table(name: str) -> dict[str, Any]:
    """Read one of the TOML files in ``simulator/data``."""
    text = resources.files("simulator.data").joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_bytes(path: Path, *, name: str) -> bytes:
    """Read a whole file of at most ``FILE_BYTES_MAX``."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise InputError(Problem(name, f"there is no file {path}", _siblings(path))) from None
    except IsADirectoryError:
        raise InputError(Problem(name, f"{path} is a directory", "name a file inside it")) from None
    except PermissionError:
        raise InputError(
            Problem(name, f"no permission to read {path}", "give this user read permission")
        ) from None
    except OSError as error:
        raise InputError(Problem(name, f"cannot be read: {error.strerror or error}")) from None
    except ValueError as error:  # a path with a null byte in it
        raise InputError(Problem(name, f"is not a path: {error}")) from None
    if len(raw) > FILE_BYTES_MAX:
        raise InputError(
            Problem(
                name,
                f"is larger than {FILE_BYTES_MAX // 2**20} MiB, which no file of this kind is",
                "check that this is the file you meant",
            )
        )
    return raw


def parse_document(
    raw: bytes, *, name: str, folder: Path = Path(), flaws_raise: bool = True
) -> Document:
    """Parse the bytes of a TOML or JSON file."""
    text = _decode(raw, name=name)
    if not text.strip():
        raise InputError(Problem(name, "is empty", "docs/formats.md shows what it should hold"))
    # No TOML document begins with a brace and no JSON object with anything else.
    if text.lstrip().startswith("{"):
        document = Document(name, _parse_json(text, name=name), "json", folder)
    elif len(raw) > TOML_BYTES_MAX:
        what = f"is not a JSON object, and TOML above {TOML_BYTES_MAX // 2**20} MiB is not read"
        raise InputError(Problem(name, what, "check that this is the file you meant"))
    else:
        document = Document(name, _parse_toml(text, name=name), "toml", folder)
    problems = Problems()
    for path, what, cure in _unusable_values(document.data):
        problems.add(document.place(path), what, cure)
        if len(problems.found) >= _MISTAKES_SHOWN_MAX:
            problems.add(name, "has more mistakes of this kind")
            break
    if flaws_raise:
        problems.raise_if_any()
    return replace(document, flaws=tuple(problems.found))


def _decode(raw: bytes, *, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts offsets from behind the byte order mark.
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        line = raw.count(b"\n", 0, offset) + 1
        raise InputError(
            Problem(
                f"{name}: line {line}",
                f"is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset}",
                "save the file as UTF-8 text",
            )
        ) from None


class _Object(dict[str, Any]):
    """A JSON object that remembers its repeated keys."""

    __slots__ = ("repeated",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: tuple[str, ...] = ()
        if len(self) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self.repeated = tuple(key for key, count in counts.items() if count > 1)


def _parse_json(text: str, *, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        place = f"{name}: line {error.lineno}, column {error.colno}"
        raise InputError(Problem(place, f"is not valid JSON: {error.msg}")) from None
    except RecursionError:
        raise InputError(Problem(name, "is nested too deeply")) from None
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise InputError(Problem(name, "holds a number with far too many digits")) from None
    assert isinstance(data, dict), "a text that begins with a brace is an object"
    return data


def _parse_toml(text: str, *, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if _is_json(text):
            raise InputError(
                Problem(name, "holds a bare JSON value", "give an object { ... }")
            ) from None
        raise InputError(_toml_problem(str(error), text, name=name)) from None
    except RecursionError:
        raise InputError(Problem(name, "is nested too deeply")) from None
    except ValueError as error:  # impossible dates, integers of thousands of digits
        raise InputError(Problem(name, f"is not valid TOML: {error}")) from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _toml_problem(message: str, text: str, *, name: str) -> Problem:
    match = _LINE_AND_COLUMN.match(message)
    if match:
        place = f"{name}: line {match['line']}, column {match['column']}"
        return Problem(place, f"is not valid TOML: {match['what']}")
    last = len(text.rstrip().splitlines())
    place = f"{name}: line {last}, the end of the file"
    return Problem(place, f"is not valid TOML: {message.removesuffix(_AT_END)}")


def _unusable_values(data: dict[str, Any]) -> Iterator[tuple[Where, str, str]]:
    """Yield path, mistake and cure of values that the syntax allows and Sailor rejects."""
    waiting: deque[tuple[Where, dict[str, Any] | list[Any]]] = deque([((), data)])
    while waiting:
        path, table = waiting.popleft()
        if isinstance(table, _Object):
            for repeated in table.repeated:
                yield (*path, repeated), "is given more than once", "keep one of them"
        if len(path) > _DEPTH_MAX:
            yield path[:3], "is nested too deeply", f"use at most {_DEPTH_MAX} levels"
            continue
        inner: Iterable[tuple[str | int, Any]] = (
            table.items() if isinstance(table, dict) else enumerate(table)
        )
        for key, value in inner:
            if isinstance(key, str) and not _is_unicode(key):
                yield path, f"has the key {key!a}, which is not valid Unicode", ""
            elif isinstance(value, dict | list):
                waiting.append(((*path, key), value))
            elif isinstance(value, float):
                if not math.isfinite(value):
                    yield (*path, key), f"is {_spelt(value)}", "give a finite number"
            elif isinstance(value, str) and not _is_unicode(value):
                yield (*path, key), f"is {ascii(value)[:60]}, which is not valid Unicode", ""


def _spelt(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _is_unicode(text: str) -> bool:
    """JSON can write half a surrogate pair, which cannot be printed."""
    if text.isascii():
        return True
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _siblings(path: Path) -> str:
    """Suggest files with similar names in the folder of a missing one."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return f"there is no directory {path.parent} either"
    close = nearest(path.name, names)
    return close if close.startswith("did you mean") else "check the path"


def list_folder(folder: Path) -> list[Path]:
    """List the files of a folder, sorted by name."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise InputError(
            Problem(str(folder), f"cannot be listed: {error.strerror or error}", "name a folder")
        ) from None
