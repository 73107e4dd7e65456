"""Every Python file of the project as a syntax tree, with what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("simulator", "planner", "worker", "sailor", "agents", "sailord")


@dataclass(frozen=True, slots=True)
class Module:
    """One file of Python, parsed."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@cache
def modules(root: Path, folders: tuple[str, ...] = PACKAGES) -> list[Module]:
    """Every module below the folders, by its dotted name (``__init__`` kept)."""
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.append(Module(name, path, source, ast.parse(source, str(path))))
    return found


@cache
def imports(module: Module) -> tuple[str, ...]:
    """Each dotted name that the module imports, wherever in the file it does so."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = _absolute(module, node)
                yield from (f"{base}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    base = module.name.split(".")[: -node.level]
    return ".".join([*base, node.module] if node.module else base)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
