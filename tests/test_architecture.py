"""The layers hold, the pure modules are pure, and every module says what it is for.

Everything is read from the syntax trees of the files; nothing is imported, except in one
test that looks at what an import really loads.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A package and the parts of the others that it may import; lower layers come first.
LAYERS: dict[str, tuple[str, ...]] = {
    "simulator": (),
    "planner": ("simulator",),
    "worker": ("simulator",),
    "agents": ("simulator", "worker.protocol", "worker.layout", "worker.slots"),
    "sailord": (
        *("simulator", "planner", "worker.protocol", "worker.layout", "worker.slots"),
        *("worker.sameness", "worker.table"),
        *("agents.clock", "agents.failing", "agents.folder", "agents.keys", "agents.logs"),
        *("agents.packing", "agents.protocol"),
        *("agents.peers", "agents.signing", "agents.store", "agents.systemd", "agents.tasks"),
        "agents.wire",
    ),
}
TORCH = ("torch", "deepspeed", "torchvision")
TORCH_FREE = (
    "simulator",
    "planner",
    "agents",
    "sailord",
    "worker.__init__",
    "worker.protocol",
    "worker.layout",
    "worker.sameness",
    "worker.slots",
    "worker.table",
)

# Time, chance and the outside world enter a pure package only as arguments.
PURE = ("simulator", "planner")
IMPURE = (
    *("asyncio", "concurrent", "logging", "multiprocessing", "random", "secrets", "select"),
    *("signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib"),
    *("http", "uuid", "sailord", "agents", "worker", "numpy.random"),
)
CLOCKS = ("now", "today", "utcnow")
# A path may be handed on anywhere; only these modules of the pure packages look at the disk.
EDGES = ("simulator.files", "simulator.facts")
FILES = ("os", "io", "shutil", "glob", "fileinput", "importlib.resources", "mmap")
ON_DISK = (
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "stat"),
    *("exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "resolve", "absolute"),
)

# So do they in what decides, and in all that it is made of.
CORES = (
    *("sailord.decide", "sailord.recover", "sailord.invariants", "sailord.objections"),
    "agents.decide",
)

NAMES_BANNED = ("common", "helper", "helpers", "manager", "managers", "misc", "util", "utils")
LINES_MAX = 500


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


def modules(root: Path, folders: tuple[str, ...] = tuple(LAYERS)) -> list[Module]:
    """Every module below the folders, by its dotted name (``__init__`` kept)."""
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.append(Module(name, path, source, ast.parse(source, str(path))))
    return found


def imports(module: Module) -> Iterator[str]:
    """Each dotted name that the module imports, wherever in the file it does so."""
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


def layer_breaches(module: Module) -> Iterator[str]:
    """Imports that reach up, or into another package past its public face."""
    allowed = (module.package, *LAYERS[module.package])
    for name in imports(module):
        if within(name, tuple(LAYERS)) and not within(name, allowed):
            yield f"{module.name} imports {name}"


def torch_breaches(module: Module) -> Iterator[str]:
    """Imports of torch where there must be none."""
    if within(module.name, TORCH_FREE):
        for name in imports(module):
            if within(name, TORCH):
                yield f"{module.name} imports {name}"


def purity_breaches(module: Module) -> Iterator[str]:
    """Clocks, chance, networks and files where only arguments should be."""
    if module.package in PURE:
        yield from _impurities(module, IMPURE)


def _impurities(module: Module, impure: tuple[str, ...]) -> Iterator[str]:
    forbidden = impure if within(module.name, EDGES) else (*impure, *FILES)
    for name in imports(module):
        if within(name, forbidden):
            yield f"{module.name} imports {name}"
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in CLOCKS:
                yield f"{module.name}:{node.lineno} asks a clock ({attribute})"
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in ON_DISK:
                if not within(module.name, EDGES):
                    yield f"{module.name}:{node.lineno} looks at the disk ({attribute})"
            case ast.Attribute(value=ast.Name("np" | "numpy"), attr="random"):
                yield f"{module.name}:{node.lineno} draws random numbers"
            case ast.Call(func=ast.Name("open" | "print" | "input" as function)):
                if not within(module.name, EDGES):
                    yield f"{module.name}:{node.lineno} calls {function}()"


def made_of(found: dict[str, Module], *names: str) -> set[str]:
    """The modules that these import, and those that they import in turn, and they themselves."""
    seen: set[str] = set()
    rest = list(names)
    while rest:
        name = rest.pop()
        if name not in seen:
            seen.add(name)
            for used in imports(found[name]):
                rest += [each for each in (used, used.rpartition(".")[0]) if each in found]
    return seen


def document_breaches(module: Module) -> Iterator[str]:
    """Modules, and public classes and functions, that do not say what they are."""
    if not _is_sentence(ast.get_docstring(module.tree)):
        yield f"{module.name} has no docstring whose first paragraph is a sentence"
    for node in module.tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if not node.name.startswith("_") and not ast.get_docstring(node):
                    yield f"{module.name}:{node.lineno} {node.name} has no docstring"


def _is_sentence(docstring: str | None) -> bool:
    return docstring is not None and docstring.partition("\n\n")[0].rstrip().endswith(
        (".", "?", "!", ":")
    )


def silencer_breaches(module: Module) -> Iterator[str]:
    """Silenced checks that name no rule or give no reason."""
    reasoned = re.compile(r"noqa: [A-Z]+\d+\W+\w+ \w+|type: ignore\[[\w, -]+\]\W+\w+ \w+")
    for number, line in enumerate(module.source.splitlines(), start=1):
        if re.search(r"#\s*(noqa|type:\s*ignore)", line) and not reasoned.search(line):
            yield f"{module.name}:{number} silences a check without its rule and a reason"


def shape_breaches(module: Module) -> Iterator[str]:
    """Names that mean nothing, and files too long for one reading."""
    if within(module.path.stem, NAMES_BANNED):
        yield f"{module.name}: a shared noun lives in the lowest package that means it"
    lines = len(module.source.splitlines())
    if lines > LINES_MAX:
        yield f"{module.name} has {lines} lines; one reading is {LINES_MAX}"


CHECKS = (
    layer_breaches,
    torch_breaches,
    purity_breaches,
    document_breaches,
    silencer_breaches,
    shape_breaches,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_module_breaks_the_rule(check):
    found = modules(ROOT)
    assert {module.package for module in found} == set(LAYERS), "a package is missing"
    assert [breach for module in found for breach in check(module)] == []


def test_what_decides_knows_no_clock_and_no_chance():
    found = {module.name: module for module in modules(ROOT)}
    # They may be made of each other.
    impure = tuple(name for name in IMPURE if name not in {"sailord", "agents"})
    cores = made_of(found, *CORES)
    assert {"sailord.facts", "sailord.moves", "agents.model"} <= cores
    assert [b for name in sorted(cores) for b in _impurities(found[name], impure)] == []


def test_tests_and_programs_keep_their_shape():
    found = modules(ROOT, ("tests", "benchmarks", "examples", "scripts"))
    breaches = [
        breach
        for module in found
        for check in (shape_breaches, silencer_breaches)
        for breach in check(module)
        if module.path != Path(__file__).resolve()  # Holds offences as examples, below.
    ]
    breaches += [f"{module.name} has no docstring" for module in found if not _says(module)]
    assert breaches == []


def _says(module: Module) -> bool:
    return _is_sentence(ast.get_docstring(module.tree))


def test_worker_package_itself_imports_nothing():
    (module,) = (m for m in modules(ROOT) if m.name == "worker.__init__")
    assert list(imports(module)) == []


def test_importing_the_torch_free_packages_loads_no_torch():
    names = [m.name.removesuffix(".__init__") for m in modules(ROOT) if within(m.name, TORCH_FREE)]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & set({TORCH!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "line", "check"),
    [
        ("simulator.plan", "import planner", layer_breaches),
        ("simulator.plan", "from planner import search", layer_breaches),
        ("planner.search", "import sailord.cli", layer_breaches),
        ("sailord.shell", "from agents import probe", layer_breaches),
        ("agents.probe", "from worker.runtime import Stage", layer_breaches),
        ("agents.probe", "def f():\n    import torch", torch_breaches),
        ("worker.protocol", "from torch import nn", torch_breaches),
        ("sailord.cli", "import importlib\nimportlib.import_module('torch.nn')", torch_breaches),
        ("simulator.plan", "import time", purity_breaches),
        ("simulator.plan", "from numpy import random", purity_breaches),
        ("simulator.plan", "import numpy as np\nnp.random.default_rng()", purity_breaches),
        ("simulator.plan", "path.read_text()", purity_breaches),
        ("simulator.plan", "open('x')", purity_breaches),
        ("planner.search", "import datetime\ndatetime.date.today()", purity_breaches),
        ("simulator.plan", "x = 1", document_breaches),
        ("simulator.plan", '"""A sentence."""\ndef f(): ...', document_breaches),
        ("simulator.plan", "x = 1  # noqa", silencer_breaches),
        ("simulator.plan", "x = 1  # noqa: E501", silencer_breaches),
        ("simulator.plan", "x = 1  # type: ignore[misc]", silencer_breaches),
        ("simulator.utils", "", shape_breaches),
        ("simulator.plan", "\n" * (LINES_MAX + 1), shape_breaches),
    ],
)
def test_a_breach_is_seen(name, line, check):
    module = Module(name, Path(*name.split(".")).with_suffix(".py"), line, ast.parse(line))
    assert list(check(module))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sailord.shell", "from agents.protocol import Hello\nfrom worker import protocol"),
        ("planner.search", "from simulator.plan import Plan"),
        ("worker.runtime", "import torch.nn"),
        ("simulator.sub.plan", "from . import other\nfrom ..plan import Plan"),
        ("simulator.plan", "import x  # noqa: PLC0415 - a slow import"),
        ("agents.probe", "import time, asyncio, socket"),
        ("simulator.job_file", "from pathlib import Path\nfolder = Path() / 'x'"),
        ("simulator.files", "path.read_text()"),
    ],
)
def test_what_is_allowed_passes(name, line):
    source = f'"""A sentence."""\n{line}'
    module = Module(name, Path(*name.split(".")).with_suffix(".py"), source, ast.parse(source))
    assert [breach for check in CHECKS for breach in check(module)] == []
