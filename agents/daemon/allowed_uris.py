"""Where jobs may have checkpoints and data: the prefixes of URIs that the operator names.

A URI is looked at before anything is opened, so a refusal says nothing about what exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote, urlsplit

from yarl import URL

from simulator.documents.fields import InvalidValue, Table, quote
from simulator.documents.problems import InputError, Problem

ANY = "*"
BUCKETS = ("gs://", "gcs://", "s3://", "s3a://", "az://", "abfs://")
"""Object stores, whose addresses name a bucket and no host."""
_HOSTS = ("http", "ftp", "ftps", "sftp", "ssh", "smb", "github", "git", "jupyter", "dask")
"""Never allowed: these name hosts, and would have this machine connect to any of them."""
_FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^\x00-\x20\x7f]*\Z", re.ASCII)
_UNSAFE = re.compile(r"[\"'`$\\]")
"""Characters that a prefix must not contain, since it is written into scripts and TOML files."""
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Purpose:
    """What the URIs of a job are for."""

    what: str
    section: str
    """Where the operator names prefixes."""
    never: frozenset[str]
    default: tuple[str, ...]
    example: str

    @property
    def cure(self) -> str:
        return f"ask the operator, who names prefixes as allowed under {self.section}"


CHECKPOINTS = Purpose(
    "checkpoints",
    "[checkpoints] of sailord.toml",
    frozenset((*_HOSTS, "https")),
    BUCKETS,
    '["gs://bucket/", "file:///srv/data"]',
)
MOUNTS = Purpose(
    "data",
    "[mounts] of sailord.toml and agent.toml",
    # The agent copies with its own rights, and links in a folder could lead it to its secrets.
    frozenset((*_HOSTS, "file", "local")),
    (*BUCKETS, "abfss://", "hf://", "https://"),
    '["gs://bucket/", "https://data.internal/"]',
)
"""``https://`` alone allows public addresses only."""


def read_allowed(table: Table, purpose: Purpose) -> tuple[str, ...]:
    """Read ``allowed`` of a section: which URIs jobs may name."""

    def accept(value: object) -> tuple[str, ...]:
        cure = f"give prefixes such as {purpose.example}"
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidValue(f"is {quote(value)}", cure)
        for each in value:
            if wrong := check_prefix(each, purpose):
                raise InvalidValue(f"{quote(each)} {wrong}", cure)
        return tuple(value)

    allowed = table.value("allowed", accept)
    table.finish()
    return purpose.default if allowed is None else allowed


def check_prefix(prefix: str, purpose: Purpose) -> str:
    """Return what is wrong with a prefix of the operator's; empty: nothing."""
    if prefix == ANY:
        return ""
    if _FORM.match(prefix) is None:
        return "is not SCHEME://PREFIX"
    if _UNSAFE.search(prefix):
        return "holds a quote, a dollar sign or a backslash"
    scheme = prefix.partition("://")[0]
    if scheme in purpose.never:
        return f"{scheme} cannot hold {purpose.what}"
    if scheme == "file" and not prefix.startswith("file:///"):
        return "names no absolute path"
    if scheme == "https" and prefix != "https://":
        return _why_no_request_matches(prefix)
    return ""


def _why_no_request_matches(prefix: str) -> str:
    """Return why no request of a client can begin with this https prefix; empty: one can."""
    try:
        url = URL(prefix)
        form = str(url.with_user(None).with_fragment(None)) if url.host else ""
    except ValueError:
        form = ""
    if not form:
        return "names no host"
    return "" if form == prefix else f"would never match; write {quote(form)}"


def check_uri(uri: str, allowed: Sequence[str], purpose: Purpose, place: str) -> None:
    """Raise ``InputError`` unless the URI begins with an allowed prefix."""
    if uri.startswith("/"):
        uri = f"file://{uri}"
    if ANY in allowed:
        return
    scheme, _, path = uri.partition("://")
    # A chain such as simplecache::http://host would hide the scheme that is used.
    is_sound = _FORM.match(uri) and "::" not in path and scheme not in purpose.never
    if is_sound and ".." not in unquote(path).split("/"):
        if scheme == "file":
            # Resolve links: the folder that they lead to has to be allowed.
            folders = [each[7:] for each in allowed if each.startswith("file://")]
            real = os.path.realpath(path)
            if path.startswith("/") and any(_is_below(real, os.path.realpath(f)) for f in folders):
                return
        elif any(_is_below(uri, each) for each in allowed) and not (
            scheme == "https" and _names_private(uri) and not is_host_allowed(uri, allowed)
        ):
            return
    what = f"{uri[:200]!r} is not where jobs may have {purpose.what}"
    is_path = scheme == "file" and scheme in purpose.never
    cure = "give the path alone, which workers read as their user" if is_path else purpose.cure
    raise InputError(Problem(place, what, cure))


def is_host_allowed(uri: str, allowed: Sequence[str]) -> bool:
    """Return whether a prefix names the host of a URI, which may then be a private one."""
    hosts = [each for each in allowed if each.startswith("https://") and each != "https://"]
    return any(_is_below(uri, each) for each in hosts)


def is_public(address: str) -> bool:
    """Return whether an IP address is public; IPv4 addresses written as IPv6 are judged as IPv4."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = _inner(parsed) if isinstance(parsed, IPv6Address) else None
    if inner is not None:
        parsed = inner
    return parsed.is_global and not parsed.is_multicast


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    tunnel = None if address.teredo is None else address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or tunnel


def _names_private(uri: str) -> bool:
    """Return whether a URI names an address that is not public; names are not looked up."""
    try:
        host = urlsplit(uri).hostname or ""
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return not is_public(host)


def _is_below(name: str, folder: str) -> bool:
    return (
        name == folder.rstrip("/")
        or name.startswith(folder.rstrip("/") + "/")
        or (folder.endswith("://") and name.startswith(folder))
    )
