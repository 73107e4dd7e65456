"""Packs the work folder of a script: chooses its files, and writes the archive."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pathspec import GitIgnoreSpec

from agents.work.archive import FILES_MAX, leads_outside, link_on_the_way, pack
from agents.work.package import BYTES_MAX
from simulator.documents.problems import InputError, Problem, Problems

NEVER = {".git", "__pycache__"}
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
"""A folder with this file is a virtual environment, which holds paths of this machine."""
LARGEST_SHOWN = 3
GIT_S = 10.0
"""How long git may take to say what it tracks."""
LOOKED_AT_MAX = 200_000
"""Most entries to look at: enough to name the largest ones, in about a second."""
CURE = "list what nodes do not need in .gitignore, name data with --mount, or another --workdir"


@dataclass(slots=True)
class Selection:
    """The files and links of a folder that travel."""

    names: list[str] = field(default_factory=list)
    bytes: int = 0
    sizes: Counter[str] = field(default_factory=Counter)
    """Bytes below each entry of the folder itself."""

    def without(self, root: Path, left_out: Collection[str]) -> Selection:
        """Return what is left without some files and folders."""
        kept = Selection()
        for name in self.names:
            if any(name == each or name.startswith(f"{each}/") for each in left_out):
                continue
            kept.names.append(name)
            size = 0 if (root / name).is_symlink() else (root / name).stat().st_size
            kept.bytes += size
            kept.sizes[name.partition("/")[0]] += size
        return kept


def select(root: Path, *, mounts: Collection[str] = ()) -> Selection:
    """Choose the files of a folder that travel; raises ``InputError`` if that is too much.

    ``.gitignore`` files hold as git reads them: nested ones, and those above in its repository.
    Links that lead outside are refused. The names in ``mounts`` are left out: nodes have the data
    elsewhere.
    """
    found, problems = Selection(), Problems()
    links: dict[str, str] = {}
    for entry in _entries(root, "", _specs_above(root), mounts):
        if len(found.names) >= LOOKED_AT_MAX:
            break
        name = entry.path[len(str(root)) :].lstrip("/")
        if entry.is_symlink():
            if leads_outside(name, os.readlink(entry.path)):
                what = f"is a link that leads out of the folder, to {os.readlink(entry.path)}"
                cure = f"list it in .gitignore, or name it as data: --mount {name}=PATH"
                problems.add(name, what, cure)
                continue
            links[name] = os.readlink(entry.path)
        else:
            size = entry.stat(follow_symlinks=False).st_size
            found.bytes += size
            found.sizes[name.partition("/")[0]] += size
        found.names.append(name)
    for name, target in links.items():
        through = link_on_the_way(name, target, links)
        if through is not None:
            what = f"is a link that leads through another, {through}"
            problems.add(name, what, f"let it name the file itself, or list {name} in .gitignore")
    if found.bytes > BYTES_MAX or len(found.names) > FILES_MAX:
        problems.found.insert(0, _too_large(root, found))
    problems.raise_if_any()
    return found


def left_behind(root: Path, selection: Selection, *, mounts: Collection[str] = ()) -> list[str]:
    """Return what does not travel although git tracks it: ``.gitignore`` names it all the same."""
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--ignored"]
    words.append("--exclude-per-directory=.gitignore")
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = os.fsdecode(done.stdout).split("\0")[:-1] if done.returncode == 0 else []
    here = {name for name in names if os.path.lexists(root / name)}
    mounted = {name for name in here for each in mounts if Path(name).is_relative_to(each)}
    return sorted(here - mounted - {*selection.names})


@dataclass(frozen=True, slots=True)
class _Spec:
    """One ``.gitignore`` file, for names relative to the packed folder."""

    patterns: GitIgnoreSpec
    inner: str = ""
    """Where it lies in the packed folder."""
    above: str = ""
    """Where the packed folder lies below it."""

    @staticmethod
    def read(folder: Path, inner: str = "", above: str = "") -> _Spec:
        path = folder / ".gitignore"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            return _Spec(GitIgnoreSpec.from_lines(text.splitlines()), inner, above)
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise InputError(Problem(str(path), what, "make it a readable file")) from None
        except ValueError as error:
            raise InputError(Problem(str(path), str(error), "correct that line")) from None

    def says(self, name: str) -> bool | None:
        """Return whether it ignores the name; ``None``: no pattern of it matches."""
        return self.patterns.check_file(self.above + name.removeprefix(self.inner)).include


def _specs_above(root: Path) -> tuple[_Spec, ...]:
    """Read the files above a folder of a repository, the innermost first."""
    found = []
    for folder in (root, *root.parents):
        above = f"{root.relative_to(folder)}/"
        if folder != root and (folder / ".gitignore").is_file():
            found.append(_Spec.read(folder, above=above))
        if (folder / ".git").exists():
            # A folder that is named is wanted, even if it is ignored as a whole.
            return () if _is_ignored("", tuple(found)) else tuple(found)
    return ()  # No repository.


def _entries(
    folder: Path,
    inner: str,
    specs: tuple[_Spec, ...],
    left_out: Collection[str],
) -> Iterator[os.DirEntry[str]]:
    """Yield the files and links below a folder that are not left out."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        cure = "make it readable, or name it in .gitignore"
        raise InputError(Problem(str(folder), f"cannot be read: {error.strerror}", cure)) from None
    names = {entry.name for entry in entries}
    if ".gitignore" in names:
        specs = (_Spec.read(folder, inner), *specs)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{inner}{entry.name}" + "/" * is_folder
        if entry.name in NEVER or name.rstrip("/") in left_out or _is_ignored(name, specs):
            continue
        if not is_folder:
            if entry.is_symlink() or entry.is_file(follow_symlinks=False):
                yield entry  # Sockets, pipes and devices do not travel.
        elif not os.path.exists(os.path.join(entry.path, VIRTUAL_ENVIRONMENT)):
            yield from _entries(Path(entry.path), name, specs, left_out)


def _is_ignored(name: str, specs: tuple[_Spec, ...]) -> bool:
    """Return the answer of the innermost file that has a matching pattern."""
    return next((said for each in specs if (said := each.says(name)) is not None), False)


def _too_large(root: Path, found: Selection) -> Problem:
    largest = (f"{name} {megabytes(size)}" for name, size in found.sizes.most_common(LARGEST_SHOWN))
    most = f"{megabytes(BYTES_MAX)} in {FILES_MAX:,} files"
    what = (
        f"is too large to travel: {megabytes(found.bytes)} in {len(found.names):,} files, and "
        f"{most} may; the largest: {', '.join(largest)}"
    )
    return Problem(str(root), what, CURE)


def megabytes(count: int) -> str:
    """Write a number of bytes in a unit that fits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def pack_files(root: Path, selection: Selection, out: IO[bytes]) -> None:
    """Pack the selected files of a folder into a file."""
    try:
        pack(root, selection.names, out)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise InputError(Problem(str(error.filename or root), what)) from None
    out.flush()
    if out.tell() > BYTES_MAX:  # Content that does not compress, and its headers.
        raise InputError(_too_large(root, selection))
