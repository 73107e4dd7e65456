"""Reads the page's files once, with their types, tags and compressed forms."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to be served."""

    body: bytes
    zipped: bytes
    content_type: str
    tag: str
    """Changes with the content."""


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name."""
    found = {}
    for each in files("sailord.page").joinpath("static").iterdir():
        ending = each.name.rpartition(".")[2]
        if ending in TYPES:
            body = each.read_bytes()
            tag = hashlib.sha256(body).hexdigest()[:16]
            found[each.name] = PageFile(body, gzip.compress(body, mtime=0), TYPES[ending], tag)
    return found
