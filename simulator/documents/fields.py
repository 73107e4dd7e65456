"""Reads typed values from the tables of a file, and collects mistakes instead of raising them.

A reader opens the file with ``open_table``, reads each key with ``Table.integer``,
``Table.text`` and so on, and ends with ``Table.finish``, which reports unknown keys.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Any, TypeVar

from simulator.documents.files import Document, Where
from simulator.documents.problems import Problems, nearest

T = TypeVar("T")
TextT = TypeVar("TextT", bound=str)
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    D = TypeVarWithDefault("D", default=None)

INTEGER_MAX = 2**53
"""The largest whole number that converts to a float exactly."""

_SHOWN_MAX = 60


class InvalidValue(Exception):  # noqa: N818  # every reader catches it, so it is no error
    """Raised by a validator: what is wrong with a value, and the cure."""

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.cure = cure


def quote(value: object) -> str:
    """Return a value as the file writes it, shortened to one line."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."


def toml_value(value: object) -> str:
    """Return a value as TOML, of which JSON is a part apart from its escapes of rare characters."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def valid_integer(value: object, least: int | None, most: int | None) -> int:
    """Return an integer within bounds; ``true`` and 8.0 are not integers."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValue(f"is {quote(value)}", f"give {_whole_words(least, most)}")
    if (least is not None and value < least) or abs(value) > (
        INTEGER_MAX if most is None else most
    ):
        raise InvalidValue(f"is {quote(value)}", f"give {_whole_words(least, most)}")
    return value


def valid_number(
    value: object, least: float | None, above: float | None, most: float | None, below: float | None
) -> float:
    """Return a finite number within bounds as a float."""
    words = _real_words(least, above, most, below)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidValue(f"is {quote(value)}", f"give {words}")
    if isinstance(value, int) and abs(value) > INTEGER_MAX:
        raise InvalidValue("is far too large", f"give {words}")
    inside = (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if not inside:
        raise InvalidValue(f"is {quote(value)}", f"give {words}")
    return float(value)


def _whole_words(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f"a whole number from {least} to {most}"
    if least == 1:
        return "a positive whole number"
    return "a whole number" + ("" if least is None else f", {least} or more")


def _real_words(
    least: float | None, above: float | None, most: float | None, below: float | None
) -> str:
    named = {"at least": least, "above": above, "at most": most, "below": below}
    limits = [f"{words} {limit:g}" for words, limit in named.items() if limit is not None]
    return "a number" + (f" {' and '.join(limits)}" if limits else "")


@dataclass(slots=True)
class Table:
    """One table of a file; records which keys were read, to report the unknown ones."""

    values: dict[str, Any]
    document: Document
    problems: Problems
    path: Where = ()
    keys_read: dict[str, None] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return self.document.place(self.path, is_table=True)

    def place_of(self, key: str, *inner: str | int) -> str:
        return self.document.place((*self.path, key, *inner))

    def __contains__(self, key: str) -> bool:
        self.keys_read[key] = None
        return key in self.values

    def report(self, key: str, what: str, cure: str = "") -> None:
        """Report a mistake in the value of a key, unless the parser already reported a flaw."""
        place = self.place_of(key)
        if all(flaw.place != place for flaw in self.document.flaws):
            self.problems.add(place, what, cure)

    def no_longer_read(self, keys: Iterable[str]) -> list[str]:
        """Accept keys that earlier versions read; return the places of those in the file."""
        return [self.place_of(key) for key in keys if key in self]

    def finish(self) -> None:
        """Report every key that was not read as unknown."""
        for key in self.values:
            if key not in self.keys_read:
                self.problems.add(
                    self.place, f"has an unknown key {quote(key)}", nearest(key, self.keys_read)
                )

    def value(
        self,
        key: str,
        accept: Callable[[Any], T],
        *,
        default: D = None,  # type: ignore[assignment]  # the default of its type
        required: bool = False,
    ) -> T | D:
        """Read one value with a validator; return the default if it is absent or wrong."""
        if key not in self and not required:
            return default
        try:
            # Every validator rejects None, so a missing key gets the cure of a wrong value.
            return accept(self.values.get(key))
        except InvalidValue as fault:
            self.report(key, fault.what if key in self else "is missing", fault.cure)
            return default

    def integer(
        self,
        key: str,
        *,
        default: D = None,  # type: ignore[assignment]  # the default of its type
        least: int | None = 1,
        most: int | None = None,
        required: bool = False,
    ) -> int | D:
        """Read a whole number, by default a positive one."""
        return self.value(
            key, lambda value: valid_integer(value, least, most), default=default, required=required
        )

    def number(
        self,
        key: str,
        *,
        default: D = None,  # type: ignore[assignment]  # the default of its type
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        below: float | None = None,
        required: bool = False,
    ) -> float | D:
        """Read a finite number."""
        return self.value(
            key,
            lambda value: valid_number(value, least, above, most, below),
            default=default,
            required=required,
        )

    def text(
        self,
        key: str,
        *,
        default: D = None,  # type: ignore[assignment]  # the default of its type
        required: bool = False,
    ) -> str | D:
        """Read a non-empty string."""
        return self.value(key, valid_text, default=default, required=required)

    def choice(
        self,
        key: str,
        known: Sequence[TextT],
        *,
        default: D = None,  # type: ignore[assignment]  # the default of its type
        required: bool = False,
    ) -> TextT | D:
        """Read one of a few words."""
        return self.value(
            key, lambda value: _one_of(known, value), default=default, required=required
        )

    def choices(self, key: str, known: Sequence[TextT]) -> tuple[TextT, ...]:
        """Read a list of some of a few words; without the key it is empty."""
        good: list[TextT] = []
        for index, value in enumerate(self._list(key, required=False) or ()):
            try:
                good.append(_one_of(known, value))
            except InvalidValue as fault:
                self.problems.add(self.place_of(key, index), fault.what, fault.cure)
        return tuple(good)

    def flag(self, key: str, *, default: bool) -> bool:
        """Read ``true`` or ``false``."""

        def accept(value: Any) -> bool:
            if not isinstance(value, bool):
                raise InvalidValue(f"is {quote(value)}", "give true or false")
            return value

        return self.value(key, accept, default=default)

    def integers(self, key: str, *, least: int = 1) -> tuple[int, ...] | None:
        """Read a non-empty list of whole numbers."""
        values = self._list(key, required=False)
        if values is None:
            return None
        good: list[int] = []
        for index, value in enumerate(values):
            try:
                good.append(valid_integer(value, least, None))
            except InvalidValue as fault:
                self.problems.add(self.place_of(key, index), fault.what, fault.cure)
        return tuple(good) if len(good) == len(values) else None

    def table(self, key: str, *, required: bool = False) -> Table | None:
        """Open an inner table."""
        if key not in self:
            if required:
                self.problems.add(self._inner_place(key), "is missing")
            return None
        value = self.values[key]
        if not isinstance(value, dict):
            self.problems.add(self.place_of(key), f"is {quote(value)}", "give a table")
            return None
        return Table(value, self.document, self.problems, (*self.path, key))

    def section(self, key: str) -> Table:
        """Open an optional inner table; an absent one reads as empty."""
        return self.table(key) or Table({}, self.document, self.problems, (*self.path, key))

    def tables(self, key: str, *, required: bool = False) -> Iterator[Table]:
        """Open each table of a list of tables."""
        for index, value in enumerate(self._list(key, required=required, what="tables") or ()):
            if isinstance(value, dict):
                yield Table(value, self.document, self.problems, (*self.path, key, index))
            else:
                place = self.place_of(key, index)
                self.problems.add(place, f"is {quote(value)}", "give a table")

    def _list(self, key: str, *, required: bool, what: str = "values") -> list[Any] | None:
        if key not in self:
            if required:
                self.report(key, "is missing", f"give a list of {what}")
            return None
        value = self.values[key]
        if not isinstance(value, list):
            self.report(key, f"is {quote(value)}", f"give a list of {what}")
            return None
        if not value:
            cure = "" if required else ", or leave the key out"
            self.report(key, "is an empty list", f"give at least one entry{cure}")
            return None
        return value

    def _inner_place(self, key: str) -> str:
        return self.document.place((*self.path, key), is_table=True)


def _one_of(known: Sequence[TextT], value: object) -> TextT:
    for word in known:
        if word == value:
            return word
    words = " or ".join(f'"{word}"' for word in known)
    raise InvalidValue(f"is {quote(value)}", f"give {words}")


def valid_text(value: object) -> str:
    """Return a non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue(f"is {quote(value)}", "give a text")
    return value


def valid_timestamp(value: object) -> str:
    """Return a TOML or ISO 8601 date and time as ISO 8601; without a time zone it is UTC."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise InvalidValue(
            f"is {quote(value)}", "give a date and time such as 2030-01-31T12:00:00Z"
        )
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()


def open_table(document: Document, problems: Problems) -> Table:
    """Open a file's top-level table, and report the flaws that the parser found."""
    problems.found.extend(document.flaws)
    return Table(document.data, document, problems)
