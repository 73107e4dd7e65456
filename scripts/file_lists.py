"""Writes the lists of files in the READMEs of the packages: each file with its first line.

Everything below the heading ``## Files`` of such a README is written here, by ``make file-lists``.
A folder of a package with more than a few files has a README of its own, in which folders within
it are sections; the files of a smaller folder are listed by the README above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agents", "planner", "sailord", "simulator", "worker")
HEADING = "## Files\n"
FEW = 3
DASH = " \N{EN DASH} "
FIRST_LINE = re.compile(r'\A(?:#!.*\n)?(?:r?"""|#|//|/\*) ?(.*?[.?!])(?:"""| \*/)?\n')
"""A docstring or a comment whose first line is a sentence, or several."""
SUFFIXES = (".css", ".js", ".py", ".sh", ".toml", ".yaml")


def readmes(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each README with the text that it should have."""
    for package in PACKAGES:
        yield _readme(root / package, _package_list(root / package))
        for folder in _folders(root / package):
            if _is_large(folder):
                yield _readme(folder, _folder_list(folder))


def _readme(folder: Path, files: list[str]) -> tuple[Path, str]:
    path = folder / "README.md"
    written = path.read_text(encoding="utf-8") if path.exists() else f"# {folder.name}\n"
    head = written.partition(f"\n{HEADING}")[0].rstrip("\n")
    remark = "<!-- Written by `make file-lists` from the first line of each file. -->"
    return path, "\n".join([f"{head}\n\n{HEADING}", remark, "", *files]) + "\n"


def _package_list(package: Path) -> list[str]:
    lines: list[str] = []
    for folder in _folders(package):
        if _is_large(folder):
            lines.append(f"- [`{folder.name}/`]({folder.name}/README.md){_about(folder)}")
        else:
            lines += _small_folder(folder)
    return lines + _files(package)


def _folder_list(folder: Path, above: str = "") -> list[str]:
    lines = _files(folder)
    for inner in _folders(folder):
        if not _is_large(inner):
            lines += _small_folder(inner)
    for inner in _folders(folder):
        if _is_large(inner):
            name = f"{above}{inner.name}/"
            about = _about(inner).removeprefix(DASH)
            lines += ["", f"### `{name}`", "", about, "", *_folder_list(inner, name)]
    return lines


def _small_folder(folder: Path) -> list[str]:
    files = _files(folder)
    for inner in _folders(folder):
        files += _small_folder(inner)
    if len(files) == 1:
        return [files[0].replace("`", f"`{folder.name}/", 1)]
    about = [f"- `{folder.name}/`{_about(folder)}"] if files else []
    return [*about, *(f"  {line}" for line in files)]


def _files(folder: Path) -> list[str]:
    return [
        f"- `{path.name}`{DASH}{_first_line(path)}"
        for path in sorted(folder.iterdir())
        if path.suffix in SUFFIXES and path.name != "__init__.py"
    ]


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "__pycache__")


def _is_large(folder: Path) -> bool:
    is_package = (folder / "__init__.py").exists()
    return is_package and (len(_files(folder)) > FEW or bool(_folders(folder)))


def _about(folder: Path) -> str:
    path = folder / "__init__.py"
    return f"{DASH}{_first_line(path)}" if path.exists() else ""


def _first_line(path: Path) -> str:
    found = FIRST_LINE.match(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path}: say what it is for in one sentence on its first line")
    return found[1].replace("``", "`")


if __name__ == "__main__":
    for path, text in readmes():
        path.write_text(text, encoding="utf-8")
