"""Modules have docstrings, plain names, at most 500 lines, and their tests where they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.python_files import PACKAGES, ROOT, Module, modules, within

NAMES_BANNED = ("common", "helper", "helpers", "manager", "managers", "misc", "util", "utils")
LINES_MAX = 500
TESTED_ELSEWHERE = {
    "sailor": "what scripts import: worker/script",
    "simulator/spec": "what files are read into: simulator/inputs",
}
TESTS_OF_SEVERAL = {"sailord/daemon": "whole sailord processes"}
SHARED_NOUNS = {"Command", "Config", "Event", "Note", "Options", "Pool", "State", "Ticked"}
"""Types of two packages that are the same noun: what the pure core of each daemon takes, keeps and
emits, its file of settings, and machines of one type in one zone."""


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


def log_breaches(module: Module) -> Iterator[str]:
    """Log lines whose event is not fixed: their facts belong in fields."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("log")), [ast.JoinedStr(), *_]):
                yield f"{module.name}:{node.lineno} logs facts in the event, not in fields"


CHECKS = (document_breaches, silencer_breaches, shape_breaches, log_breaches)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_module_breaks_the_rule(check):
    assert [breach for module in modules(ROOT) for breach in check(module)] == []


def test_a_type_name_stands_for_one_thing():
    assert set(_names_used_twice(modules(ROOT))) == SHARED_NOUNS


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("class Lot: ...", "planner"),
        ("class Lot: ...", "sailord"),
        ("Lot = tuple[int, int]", "sailord"),
        ("Lot: TypeAlias = int", "sailord"),
    ],
)
def test_a_second_thing_of_one_name_is_seen(line, package):
    found = [_module("planner.one", "class Lot: ..."), _module(f"{package}.two", line)]
    assert set(_names_used_twice(found)) == {"Lot"}


def test_private_names_constants_and_nouns_of_two_packages_are_no_second_thing():
    source = "class _Lot: ...\nLOTS_MAX = 3\nT = TypeVar('T')\nclass State: ..."
    found = [_module("agents.one", source), _module("sailord.two", source)]
    assert set(_names_used_twice(found)) == {"State"}
    assert set(_names_used_twice([found[0], _module("agents.two", source)])) == {"State twice"}


def _names_used_twice(found: list[Module]) -> Iterator[str]:
    """Types and aliases of two modules; marked, if both are in one package."""
    places: dict[str, list[str]] = {}
    for module in found:
        for name in _types_of(module.tree):
            places.setdefault(name, []).append(module.package)
    for name, packages in places.items():
        if len(packages) > 1:
            is_shared = name in SHARED_NOUNS and len(set(packages)) < len(packages)
            yield f"{name} twice" if is_shared else name


def _types_of(tree: ast.Module) -> Iterator[str]:
    """Public classes, and aliases of types by their spelling: a constant is in capitals."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case _:
                continue
        if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
            yield name


def test_tests_stand_where_their_modules_do():
    wings = {_folder(module) for module in modules(ROOT)}
    tests = {_folder(module).removeprefix("tests/") for module in modules(ROOT, ("tests",))}
    tests = {folder for folder in tests if folder.partition("/")[0] in PACKAGES}
    # Each published planner is one test file in the folder of all.
    planners = {each for each in wings if each.startswith("planner/baselines/")}
    planners -= {"planner/baselines/shared"}
    assert wings - tests == planners | TESTED_ELSEWHERE.keys()
    assert tests - wings == TESTS_OF_SEVERAL.keys()


def _folder(module: Module) -> str:
    return module.path.parent.relative_to(ROOT).as_posix()


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


@pytest.mark.parametrize(
    ("name", "line", "check"),
    [
        ("simulator.spec.plan", "x = 1", document_breaches),
        ("simulator.spec.plan", '"""A sentence."""\ndef f(): ...', document_breaches),
        ("simulator.spec.plan", "x = 1  # noqa", silencer_breaches),
        ("simulator.spec.plan", "x = 1  # noqa: E501", silencer_breaches),
        ("simulator.spec.plan", "x = 1  # type: ignore[misc]", silencer_breaches),
        ("simulator.spec.utils", "", shape_breaches),
        ("simulator.spec.plan", 'log.info(f"found {x}")', log_breaches),
        ("simulator.spec.plan", "\n" * (LINES_MAX + 1), shape_breaches),
    ],
)
def test_a_breach_is_seen(name, line, check):
    assert list(check(_module(name, line)))


def test_allowed_code_passes_every_check():
    source = '"""A sentence."""\nimport x  # noqa: PLC0415 - a slow import'
    module = _module("simulator.spec.plan", source)
    assert [breach for check in CHECKS for breach in check(module)] == []


def _module(name: str, source: str) -> Module:
    return Module(name, Path(*name.split(".")).with_suffix(".py"), source, ast.parse(source))
