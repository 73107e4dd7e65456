"""Which wing may import which, where torch may not be loaded, and which modules are pure.

Everything is read from the syntax trees of the files; nothing is imported, except in one
test that looks at what an import really loads.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.python_files import PACKAGES, ROOT, Module, imports, modules, within

# Who may import whom. A row is a wing (a folder, or one module of it): it may import itself, the
# wings that its row names, and whatever those may import in turn. Rows stand bottom-up, so a row
# names only rows above it, and there can be no circle. Lazy and type-only imports count as well.
# A name without a dot in it is a wing of the row's own package; "." is the package's own top level.
WINGS: dict[str, dict[str, str]] = {
    "simulator": {
        "arrays": "",
        "documents": "",
        "hardware": "documents",
        "models": "documents",
        "spec": "documents models",
        "network": "hardware spec",
        "cluster": "network",
        "inputs": "cluster",
        "layer_costs": "network arrays",
        "estimate": "cluster layer_costs",
        "traces": "cluster",
        ".": "inputs estimate traces",
    },
    "planner": {
        "problem": "simulator",
        "pipelines": "problem",
        "search": "pipelines",
        "paper_search": "pipelines",
        "explain": "search paper_search",
        "compare": "problem",
        "baselines.shared": "compare",
        "baselines.megatron": "baselines.shared",
        "baselines": "baselines.shared baselines.megatron",
        ".": "explain",
        "replan": ".",
        "move_policy.leave_time": "",
        "move_policy": "replan move_policy.leave_time",
        "library": "move_policy",
        "share": "library",
        "replay": "share",
    },
    "worker": {
        "types": "",
        "plain_file": "",
        "version": "",
        "closure": "",
        "atomic_file": "",
        "host_memory": "",
        "forked_process": "",
        "spec_protocol": "",
        "layout": "types simulator",
        "devices": "simulator",
        "distributed": "devices version",
        "data": "simulator forked_process atomic_file",
        "data.sources": "data",
        "data.datasets": "data.sources",
        "profiling": "layout atomic_file",
        "models.random_numbers": "layout devices data closure",
        "models.weight_files": "layout data",
        "models.built_in": "layout distributed data devices",
        "models": "models.random_numbers models.weight_files models.built_in",
        "models.user_module": "models data.datasets",
        "training": "models.user_module distributed data profiling",
        "engines.interface": "training",
        "checkpoint": "engines.interface plain_file host_memory",
        "checkpoint.snapshots": "checkpoint",
        "checkpoint.by_tensor": "checkpoint",
        "checkpoint.other_formats": "checkpoint.by_tensor",
        "engines": "checkpoint.snapshots",
        "reporting": "",
        "script": "training reporting",
        "layer_profiles": "script host_memory",
        "control": "engines script spec_protocol",
        "cli": "control layer_profiles checkpoint.other_formats",
        ".": "cli",
    },
    "sailor": {".": "worker.script"},
    "agents": {
        "protocol": "",
        "daemon": "simulator worker.plain_file worker.atomic_file worker.version",
        "rpc": "protocol daemon",
        "store": "protocol daemon",
        "object_store": "daemon",
        "core": "protocol",
        "links": "rpc daemon",
        "devices": "simulator",
        "cloud": "core daemon",
        "work": "core rpc daemon",
        "workers": "core rpc daemon worker.layout worker.plain_file worker.spec_protocol",
        "snapshots": "core rpc daemon object_store worker.checkpoint.snapshot_file "
        "worker.checkpoint.free_space worker.checkpoint.piece_sources worker.checkpoint.reader "
        "worker.plain_file",
        ".": "links devices cloud work workers snapshots store",
    },
    "sailord": {
        "text.units": "",
        "text.causes": "",
        "text.cures": "",
        "text": "text.units text.causes text.cures",
        "core.model": "agents.protocol",
        "core.queries": "core.model text.causes planner.move_policy.leave_time",
        "core.rules": "core.queries text.units",
        "core": "core.rules text.cures simulator.documents",
        "core.sharing": "core",
        "cluster_records": "core.queries agents.store",
        "planning.messages": "core.model planner",
        "planning": "planning.messages agents.daemon",
        "tokens": "agents.daemon agents.protocol simulator.documents",
        "checkpoints": "core.model planning agents.object_store "
        "worker.checkpoint.snapshot_file worker.checkpoint.manifest "
        "worker.checkpoint.compatibility worker.layout worker.types",
        "providers.interface": "simulator",
        "providers.gce": "providers.interface",
        "providers": "providers.gce agents.daemon",
        "capacity.core.rented_instance": "providers.interface",
        "capacity.core.deadline_model": "providers.interface",
        "capacity.core.model": "capacity.core.deadline_model capacity.core.rented_instance",
        "capacity.core": "capacity.core.model core.queries planning.messages text.units",
        "network.core": "agents.protocol",
        "notify.message_formats": "",
        "config": "notify.message_formats tokens network.core core.model "
        "capacity.core.model "
        "providers agents.daemon agents.rpc agents.store",
        "notify": "cluster_records config agents.rpc text.units text.causes",
        "capacity": "capacity.core cluster_records config planning",
        "goodput.core": "core.queries capacity.core.model capacity.core.rented_instance",
        "goodput": "goodput.core cluster_records",
        "controller": "core.sharing checkpoints notify cluster_records config planning agents.rpc",
        "network": "network.core controller",
        "authority": "agents.rpc",
        "own_certificate": "authority config",
        "api.access": "config",
        "page": "core.model cluster_records",
        "api.answers": "network controller capacity goodput page text",
        "api.handlers": "api.access api.answers authority agents.work "
        "worker.checkpoint.capacity_check",
        "api": "api.handlers",
        "plots": "planner",
        "client": "agents.rpc simulator",
        "screen": "client text",
        "local": "screen authority agents.store",
        "cli.shared": "client text",
        "cli.submit": "cli.shared agents.work",
        "cli.checkpoints": "cli.submit checkpoints",
        "cli.cluster": "cli.shared screen",
        "cli.planning": "cli.shared plots worker.checkpoint.capacity_check",
        "cli": "cli.shared local tokens",
        ".": "api cli cli.submit cli.checkpoints cli.cluster cli.planning own_certificate",
    },
}
TORCH = ("torch", "deepspeed", "torchvision")
TORCH_FREE = (
    "simulator",
    "planner",
    "agents",
    "sailord",
    "worker.__init__",
    "worker.types",
    "worker.layout.rank_layout",
    "worker.layout.tensor_table",
    "worker.checkpoint.capacity_check",
    "worker.checkpoint.compatibility",
    "worker.checkpoint.free_space",
    "worker.checkpoint.manifest",
    "worker.checkpoint.placement",
    "worker.checkpoint.snapshot_file",
)

# Time, chance and the outside world enter a pure package only as arguments.
PURE = ("simulator", "planner")
IMPURE = (
    *("asyncio", "concurrent", "logging", "multiprocessing", "random", "secrets", "select"),
    *("signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib"),
    *("http", "uuid", "sailord", "agents", "worker", "numpy.random"),
)
# Of impure modules, the names that are functions of their arguments alone.
PURE_NAMES = ("uuid.UUID", "uuid.uuid5")
CLOCKS = ("now", "today", "utcnow")
# A path may be handed on anywhere; only these modules of the pure packages look at the disk.
EDGES = ("simulator.documents.files", "simulator.hardware.catalogue_overlay")
FILES = ("os", "io", "shutil", "glob", "fileinput", "importlib.resources", "mmap")
ON_DISK = (
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "stat"),
    *("exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "resolve", "absolute"),
)


@cache
def wing_of(name: str) -> str:
    """The row of the table that a module belongs to: the longest one that it lies within."""
    package = name.partition(".")[0]
    rows = [_full(package, row) for row in WINGS[package]]
    return max((row for row in rows if within(name, (row,))), key=len)


def _full(package: str, row: str) -> str:
    if row == ".":
        return package
    return row if row.partition(".")[0] in WINGS else f"{package}.{row}"


def importable() -> dict[str, set[str]]:
    """What each row may import: itself, the rows that it names, and what those may import."""
    found: dict[str, set[str]] = {}
    for package, rows in WINGS.items():
        for row, named in rows.items():
            may = {_full(package, row)}
            for each in (_full(package, name) for name in named.split()):
                if each in WINGS and each != package:
                    may |= set().union(*(found[other] for other in found if within(other, (each,))))
                else:
                    assert each in found or each.startswith("worker."), f"{row}: {each} comes later"
                    may |= found.get(each, {each})
            found[_full(package, row)] = may
    return found


IMPORTABLE = importable()


def layer_breaches(module: Module) -> Iterator[str]:
    """Imports that the table of wings does not allow."""
    allowed = IMPORTABLE[wing_of(module.name)]
    for name in imports(module):
        if within(name, tuple(WINGS)) and name not in WINGS and wing_of(name) not in allowed:
            exact = {name, name.rpartition(".")[0]}  # A row may name one module of a wing.
            if not exact & allowed:
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
        if within(name, forbidden) and name not in PURE_NAMES:
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


CHECKS = (layer_breaches, torch_breaches, purity_breaches)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_module_breaks_the_rule(check):
    found = modules(ROOT)
    assert {module.package for module in found} == set(WINGS) == set(PACKAGES), (
        "a package is missing"
    )
    assert [breach for module in found for breach in check(module)] == []


def test_every_core_is_pure():
    """No clock, no chance, no file and no network in a folder named ``core``."""
    impure = tuple(name for name in IMPURE if name not in WINGS)
    cores = [module for module in modules(ROOT) if ".core." in module.name]
    assert {module.package for module in cores} >= {"agents", "sailord"}
    assert [breach for module in cores for breach in _impurities(module, impure)] == []


def test_no_modules_import_each_other_in_a_circle():
    found = {module.name: module for module in modules(ROOT)}
    graph = {name: _imported(module, found) - {name} for name, module in found.items()}
    assert circles(graph) == []


def _imported(module: Module, found: dict[str, Module]) -> set[str]:
    names = {each for name in imports(module) for each in (name, name.rpartition(".")[0])}
    return {each for each in names if each in found}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, found by removing what imports nothing that is left."""
    left = {name: set(edges) for name, edges in graph.items()}
    while free := [name for name, edges in left.items() if not edges & left.keys()]:
        for name in free:
            del left[name]
    while free := [n for n in left if not any(n in edges for edges in left.values())]:
        for name in free:
            del left[name]
    return [sorted(left)] if left else []


def test_worker_package_itself_imports_nothing():
    (module,) = (m for m in modules(ROOT) if m.name == "worker.__init__")
    assert list(imports(module)) == []


def test_handlers_reach_the_controller_through_its_view_alone():
    assert {
        module.name
        for module in modules(ROOT)
        for name in imports(module)
        if within(module.name, ("sailord.api",))
        and within(name, ("sailord.controller",))
        and not within(name, ("sailord.controller.step_rate",))
    } == {"sailord.api.handlers.controller_view"}


@pytest.mark.slow
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
        ("simulator.spec.plan", "from planner import api", layer_breaches),
        ("simulator.models.layers", "from simulator.spec.job import Job", layer_breaches),
        ("sailord.core.decide", "from sailord.planning.pool import PlannerPool", layer_breaches),
        ("sailord.core.queries.timeouts", "from sailord.core.rules import probing", layer_breaches),
        ("simulator.spec.plan", "from planner import search", layer_breaches),
        ("planner.search.bound", "import sailord.cli.main", layer_breaches),
        ("sailord.controller.loop", "from agents.devices import probe", layer_breaches),
        ("agents.devices.probe", "from worker.training.trainer import Trainer", layer_breaches),
        ("agents.devices.probe", "def f():\n    import torch", torch_breaches),
        ("worker.types", "from torch import nn", torch_breaches),
        (
            "sailord.cli.main",
            "import importlib\nimportlib.import_module('torch.nn')",
            torch_breaches,
        ),
        ("simulator.spec.plan", "import time", purity_breaches),
        ("simulator.spec.plan", "from numpy import random", purity_breaches),
        ("simulator.spec.plan", "import numpy as np\nnp.random.default_rng()", purity_breaches),
        ("simulator.spec.plan", "path.read_text()", purity_breaches),
        ("simulator.spec.plan", "open('x')", purity_breaches),
        ("planner.search.bound", "import datetime\ndatetime.date.today()", purity_breaches),
    ],
)
def test_a_breach_is_seen(name, line, check):
    module = Module(name, Path(*name.split(".")).with_suffix(".py"), line, ast.parse(line))
    assert list(check(module))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "sailord.controller.loop",
            "from agents.protocol.records import Hello",
        ),
        ("planner.search.bound", "from simulator.spec.plan import Plan"),
        ("worker.training.trainer", "import torch.nn"),
        ("simulator.spec.sub", "from . import plan\nfrom ..models import layers"),
        ("agents.devices.probe", "import time, asyncio, socket"),
        ("simulator.inputs.job_file", "from pathlib import Path\nfolder = Path() / 'x'"),
        ("simulator.documents.files", "path.read_text()"),
    ],
)
def test_allowed_code_passes_every_check(name, line):
    module = Module(name, Path(*name.split(".")).with_suffix(".py"), line, ast.parse(line))
    assert [breach for check in CHECKS for breach in check(module)] == []
