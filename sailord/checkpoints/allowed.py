"""Where jobs may have their checkpoints: the prefixes of URIs that the operator names.

A URI is looked at before anything is opened, so a refusal says nothing about what exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from simulator.documents.problems import InputError, Problem

ANY = "*"
DEFAULT = ("gs://", "gcs://", "s3://", "s3a://", "az://", "abfs://")
"""Object stores, whose addresses name a bucket and no host."""
NEVER = ("http", "https", "ftp", "ftps", "sftp", "ssh", "smb", "github", "git", "jupyter", "dask")
"""They name hosts, and would have sailord connect to any of them."""
_FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^\x00-\x20\x7f]*\Z", re.ASCII)
CURE = "ask the operator, who names prefixes as allowed under [checkpoints] of sailord.toml"


def check_prefix(prefix: str) -> str:
    """Return what is wrong with a prefix of the operator's; empty: nothing."""
    if prefix == ANY:
        return ""
    if _FORM.match(prefix) is None:
        return "is not SCHEME://PREFIX"
    scheme = prefix.partition("://")[0]
    if scheme in NEVER:
        return f"{scheme} cannot hold checkpoints"
    if scheme == "file" and not prefix.startswith("file:///"):
        return "names no absolute path"
    return ""


def check_uri(uri: str, allowed: Sequence[str]) -> None:
    """Raise ``InputError`` unless the URI begins with an allowed prefix."""
    if uri.startswith("/"):
        uri = f"file://{uri}"
    if ANY in allowed:
        return
    scheme, _, path = uri.partition("://")
    # A chain such as simplecache::http://host would hide the scheme that is used.
    is_sound = _FORM.match(uri) and "::" not in uri and scheme not in NEVER
    if is_sound and ".." not in unquote(path).split("/"):
        if scheme == "file":
            # Links are followed: what they lead to has to be allowed.
            folders = [each[7:] for each in allowed if each.startswith("file://")]
            real = os.path.realpath(path)
            if path.startswith("/") and any(_is_below(real, os.path.realpath(f)) for f in folders):
                return
        elif any(_is_below(uri, each) for each in allowed):
            return
    what = f"{uri[:200]!r} is not where jobs may have checkpoints"
    raise InputError(Problem("checkpoint: uri", what, CURE))


def _is_below(name: str, folder: str) -> bool:
    return (
        name == folder.rstrip("/")
        or name.startswith(folder.rstrip("/") + "/")
        or (folder.endswith("://") and name.startswith(folder))
    )
