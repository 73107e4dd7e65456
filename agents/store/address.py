"""Where the store is, written as one line: ``embedded:///FILE`` or ``unix:///SOCKET``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from agents.store.embedded import EmbeddedStore
from agents.store.interface import Store
from agents.store.remote import RemoteStore
from simulator.errors import InputError, Problem, Problems

TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 600.0
CURE = "write embedded:///FOLDER/store.db, or unix:///FOLDER/store.sock"


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A file of this process's own, or the socket of the process that has it."""

    kind: Literal["embedded", "unix"]
    path: Path
    timeout_s: float = TIMEOUT_S
    """Within which each call ends, over a socket."""


async def open_store(url: str) -> Store:
    """Open the store that a line names; ``InputError`` says all that is wrong with the line.

    An embedded file is opened at once, or ``StoreUnavailable`` raised if another process has it;
    the others are connected to when they are first asked something.
    """
    address = read_address(url)
    if address.kind == "embedded":
        return await EmbeddedStore.open(address.path)
    return RemoteStore(address.path, timeout_s=address.timeout_s)


def read_address(url: str) -> OnDisk:
    """Read the line, without looking at what it names."""
    place = f'the store\'s address "{url}"'
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        raise InputError(Problem(place, f"cannot be read: {error}", CURE)) from None
    problems = Problems()
    match parts.scheme:
        case "embedded":
            address = OnDisk("embedded", _read_path(parts, problems, place))
        case "unix":
            path = _read_path(parts, problems, place)
            address = OnDisk("unix", path, _take_timeout(options, problems, place))
        case _:
            raise InputError(Problem(place, "names no kind of store", CURE))
    for name in options:
        problems.add(place, f"has an option {name}, which a store of this kind has not")
    problems.raise_if_any()
    return address


def _read_path(parts: SplitResult, problems: Problems, place: str) -> Path:
    if parts.netloc:
        problems.add(place, f'has a host, "{parts.netloc}"', "a path begins with a third slash")
    elif not parts.path.startswith("/") or parts.path.endswith("/"):
        problems.add(place, "names no file by its whole path", CURE)
    return Path(parts.path)


def _take_timeout(options: dict[str, str], problems: Problems, place: str) -> float:
    text = options.pop("timeout_s", str(TIMEOUT_S))
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        cure = f"give seconds above 0, up to {TIMEOUT_S_MAX:g}"
        problems.add(place, f'timeout_s is "{text}"', cure)
    return timeout_s
