"""Enters the work folder of a script's job, as ``python train.py`` in that folder would find it.

Workers are forked with Sailor's packages loaded. What a job's setup installed comes before them;
only a package that is loaded already cannot be another version.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from simulator.documents.problems import InputError, Problem

_hidden: list[str] = []
"""Secrets of this process's job, and their lines, the longest first."""
LINE_MIN = 6
"""Lines of a secret that are shorter are hidden only with all of it."""


def enter_job(work: Mapping[str, Any]) -> None:
    """Make this process one of the job; a process never changes to another job."""
    if not work:
        return
    os.chdir(work["folder"])
    for name, path in work["secrets"].items():
        if path:
            os.environ[name] = read_secret(Path(path))
    values = {os.environ.get(name, "") for name in work["secrets"]} - {""}
    lines = {line.strip() for value in values for line in value.splitlines()}
    values |= {line for line in lines if len(line) >= LINE_MIN}
    _hidden[:] = sorted(values, key=len, reverse=True)
    if work["packages"]:
        environment = Path(work["environment"])
        os.environ["VIRTUAL_ENV"] = str(environment)
        os.environ["PATH"] = f"{environment / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        before = list(sys.path)
        site.addsitedir(work["packages"])
        sys.path[:] = [*(each for each in sys.path if each not in before), *before]
        importlib.invalidate_caches()


def read_secret(path: Path) -> str:
    """Read a secret from its file, without the end of the line."""
    return path.read_text(encoding="utf-8").rstrip("\r\n")


def redact(text: str) -> str:
    """Blot out the secrets of this process's job."""
    for value in _hidden:
        text = text.replace(value, "***")
    return text


def check(work: Mapping[str, Any]) -> None:
    """Raise ``InputError`` if the job needs what this process cannot give it."""
    problems = [
        Problem(f"[work] secrets: {name}", "is missing in this worker", "restart the node's agent")
        for name in work.get("secrets", ())
        if name not in os.environ
    ]
    if work.get("packages"):
        problems += _find_loaded_before(work["packages"])
    if problems:
        raise InputError(problems)


def _find_loaded_before(packages: str) -> Iterator[Problem]:
    """Yield a problem for each package of the job that is loaded in another version."""
    for found in distributions(path=[packages]):
        modules = (found.read_text("top_level.txt") or found.name.replace("-", "_")).split()
        origins = [getattr(sys.modules.get(each), "__file__", None) for each in modules]
        is_other = any(each and not each.startswith(packages) for each in origins)
        used = _version_without(found.name, packages)
        if is_other and used not in (None, found.version):
            what = f"installed {found.name} {found.version}, but workers run with {used}"
            yield Problem("[work] setup", what, f"install {found.name}=={used}, or change the node")


def _version_without(name: str, packages: str) -> str | None:
    """Return the version that this process had before it entered the work folder."""
    others = [each for each in sys.path if each != packages]
    found = next(iter(distributions(name=name, path=others)), None)
    return None if found is None else found.version
