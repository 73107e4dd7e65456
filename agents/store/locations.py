"""The address of the store, as a URL: ``etcd://``, ``embedded://`` or ``unix://``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from agents.daemon.credentials import check_mode
from simulator.documents.problems import InputError, Problem, Problems

TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 600.0
CURE = "write etcd://HOST,HOST:PORT, embedded:///FOLDER/store.db or unix:///FOLDER/store.sock"
ETCD_PORT = 2379
FILE_CURE = "give an absolute path that the service's user may read"
PATHS = ("password_file", "ca", "cert", "key")
SECRETS = ("password_file", "key")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A database file of this process, or the Unix socket of the process that has it."""

    kind: Literal["embedded", "unix"]
    path: Path
    timeout_s: float = TIMEOUT_S
    """The timeout of each call over the socket."""


@dataclass(frozen=True, slots=True)
class Etcd:
    """The members of an etcd cluster, and the credentials."""

    endpoints: tuple[str, ...]
    user: str = ""
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def is_encrypted(self) -> bool:
        """Whether to use TLS: with a CA's or a client's certificate."""
        return self.ca is not None or self.cert is not None


def check_address(
    url: str, problems: Problems, place: str, *, made_later: Path | None = None
) -> None:
    """Add what is wrong with the address, and with the files that it names.

    Files in the folder ``made_later`` need not exist yet.
    """
    try:
        address = read_address(url)
    except InputError as error:
        for each in error.problems:
            problems.add(place, each.what, each.cure)
        return
    for name in PATHS if isinstance(address, Etcd) else ():
        file = getattr(address, name)
        try:
            if file is not None and file.parent != made_later:
                file.read_bytes()
                if name in SECRETS:
                    check_mode(file)
        except InputError as error:
            problems.take(error, place=f"{place}: its {name},")
        except OSError as error:
            problems.add(place, f"its {name}, {file}, cannot be read: {error.strerror}", FILE_CURE)


def read_address(url: str) -> OnDisk | Etcd:
    """Read the address, without the files that it names."""
    # A password in the URL must not end in a log.
    shown = re.sub(r"//[^/?]*@", "//...@", url)
    place = f'the store\'s address "{shown}"'
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        raise InputError(Problem(place, f"cannot be read: {error}", CURE)) from None
    problems = Problems()
    address: OnDisk | Etcd
    match parts.scheme:
        case "etcd":
            address = _read_etcd(parts, options, problems, place)
        case "embedded":
            address = OnDisk("embedded", _read_path(parts, problems, place))
        case "unix":
            path = _read_path(parts, problems, place)
            address = OnDisk("unix", path, _take_timeout(options, problems, place))
        case _:
            raise InputError(Problem(place, "has an unknown scheme", CURE))
    for name in options:
        problems.add(place, f"has an unknown option for this kind of store: {name}")
    problems.raise_if_any()
    return address


def _read_path(parts: SplitResult, problems: Problems, place: str) -> Path:
    if parts.netloc:
        problems.add(place, f'has a host, "{parts.netloc}"', "write three slashes before the path")
    elif not parts.path.startswith("/") or parts.path.endswith("/"):
        problems.add(place, "has no absolute path of a file", CURE)
    return Path(parts.path)


def _read_etcd(parts: SplitResult, options: dict[str, str], problems: Problems, place: str) -> Etcd:
    if "@" in parts.netloc:
        problems.add(place, "contains a user", "write ?user=NAME&password_file=FILE instead")
    if parts.path not in ("", "/"):
        problems.add(place, f'has a path, "{parts.path}"', CURE)
    endpoints = tuple(_read_endpoint(each, problems, place) for each in parts.netloc.split(","))
    if len(set(endpoints)) < len(endpoints):
        problems.add(place, "names a member twice")
    user = options.pop("user", "")
    paths = {name: _take_path(name, options, problems, place) for name in PATHS}
    for one, other in (("cert", "key"), ("key", "cert")):
        if paths[one] and not paths[other]:
            problems.add(place, f"has {one} but no {other}", "give both, or neither")
    if bool(user) != bool(paths["password_file"]):
        problems.add(place, "has one of user and password_file", "give both, or neither")
    timeout_s = _take_timeout(options, problems, place)
    return Etcd(endpoints, user, **paths, timeout_s=timeout_s)


def _read_endpoint(text: str, problems: Problems, place: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or ETCD_PORT
    except ValueError as error:
        problems.add(place, f'"{text}" is not HOST:PORT: {error}', CURE)
        return text
    if not host:
        problems.add(place, f'"{text}" has no host', CURE)
    return f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}"


def _take_path(name: str, options: dict[str, str], problems: Problems, place: str) -> Path | None:
    if name not in options:
        return None
    path = Path(options.pop(name))
    if not path.is_absolute():
        problems.add(place, f'{name} is "{path}"', "give an absolute path")
    return path


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
