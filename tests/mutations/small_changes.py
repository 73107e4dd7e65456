"""Change one small thing at a time in the pure cores, and print changes that no test catches.

``python -m tests.mutations.small_changes sailord/core/decide.py --of 100``. Where
``tests.mutations`` breaks chosen rules, this breaks every condition:
conditions are made true or false, parts of them and fields of ``replace`` are left out, least and
greatest change places. What is printed was not caught: a rule that needs a test, code
whose change has no visible effect, or code that is not needed.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.mutations import ROOT, TESTS, copy_to, fails, pytest_command

PLUGIN = "quick_examples"
QUICK = """
from hypothesis import Phase, settings
settings.register_profile("quick", phases=[Phase.explicit, Phase.generate])
settings.load_profile("quick")
"""
"""No shrinking: it only matters whether a failure is found."""


@dataclass(frozen=True, slots=True)
class Change:
    """A piece of a module, and its replacement."""

    path: str
    line: int
    first: int
    last: int
    """Bytes of the module."""
    new: str

    def of(self, text: bytes) -> bytes:
        """Return the module with the change."""
        return text[: self.first] + self.new.encode() + text[self.last :]

    def told(self, text: bytes) -> str:
        """Describe it in a line."""
        old = " ".join(text[self.first : self.last].decode().split())
        return f"{self.path}:{self.line}: {old}  ->  {' '.join(self.new.split())}"


def changes_of(path: str, text: str) -> Iterator[Change]:
    """Yield every small change of a module."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def change(node: ast.expr, new: str) -> Change:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        return Change(path, node.lineno, first, last, new)

    for node in ast.walk(ast.parse(text)):
        for found, new in _of(node):
            yield change(found, new)


def _of(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from ((test, "True"), (test, "False"))
        case ast.match_case(guard=ast.expr() as guard):
            yield from ((guard, "True"), (guard, "False"))
        case ast.comprehension(ifs=ifs):
            yield from ((each, "True") for each in ifs)
        case ast.Return(value=(ast.BoolOp() | ast.Compare()) as value):
            yield from ((value, "True"), (value, "False"))
        case ast.BoolOp(op=op, values=values):
            for left_out in values:
                rest = [each for each in values if each is not left_out]
                yield node, f"({ast.unparse(ast.BoolOp(op, rest) if len(rest) > 1 else rest[0])})"
        case ast.Call(func=ast.Name(id="replace") as called, args=args, keywords=words):
            for left_out in words:
                rest = [each for each in words if each is not left_out]
                yield node, ast.unparse(ast.Call(called, args, rest))
        case ast.Call(func=ast.Name(id="min" | "max") as called):
            yield called, "max" if called.id == "min" else "min"


def modules() -> list[str]:
    """Return the modules of the cores that have something to change; no checks of invariants."""
    found = (path for core in TESTS for path in sorted(Path(ROOT, core).rglob("*.py")))
    names = (path.relative_to(ROOT).as_posix() for path in found if path.stem != "invariants")
    return [name for name in names if any(changes_of(name, Path(ROOT, name).read_text("utf-8")))]


def is_missed(change: Change, folder: Path) -> bool:
    """Return whether none of the core's own tests fails with it."""
    path = folder / change.path
    text = path.read_bytes()
    path.write_bytes(change.of(text))
    try:
        core = max((each for each in TESTS if change.path.startswith(f"{each}/")), key=len)
        files = [file for name in TESTS[core] for file in Path(folder, name).rglob("test_*.py")]
        names = [str(each.relative_to(folder)) for each in files]
        # Those about any events take longest.
        ordered = sorted(names, key=lambda name: ("_any_" in name, name))
        return not fails([*pytest_command(*ordered), "-p", PLUGIN], folder)
    finally:
        path.write_bytes(text)


def main() -> int:
    """Print the changes that no test catches, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="all pure cores if there are none")
    parser.add_argument("--of", type=int, metavar="N", help="try N random ones; default: all")
    parser.add_argument("--seed", type=int, default=1, help="which ones those are")
    parser.add_argument("--at-once", type=int, default=1, help="how many are tried at a time")
    asked = parser.parse_args()
    texts = {name: Path(ROOT, name).read_bytes() for name in asked.modules or modules()}
    found = [each for name in texts for each in changes_of(name, texts[name].decode())]
    if asked.of is not None:
        found = random.Random(asked.seed).sample(found, min(asked.of, len(found)))
    missed = 0
    with (
        tempfile.TemporaryDirectory(prefix="sailor-changes-") as base,
        ThreadPoolExecutor(asked.at_once) as pool,
    ):
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.at_once):
            folder = copy_to(Path(base, str(number)))
            (folder / f"{PLUGIN}.py").write_text(QUICK, encoding="utf-8")
            folders.put(folder)

        def attempt(change: Change) -> bool:
            folder = folders.get()
            try:
                return is_missed(change, folder)
            finally:
                folders.put(folder)

        for change, was_missed in zip(found, pool.map(attempt, found), strict=True):
            if was_missed:
                missed += 1
                print(change.told(texts[change.path]), flush=True)
    print(f"{len(found)} changes, {missed} not caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
