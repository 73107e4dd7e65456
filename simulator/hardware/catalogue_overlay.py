"""Catalogue facts as tables of TOML files, a user's file overlaid on the built-in ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simulator.documents.fields import Table, valid_text
from simulator.documents.files import Document, load_document
from simulator.documents.problems import Problems, nearest

# How many names follow the kind: [gpu.T4] has one, [host.n1.us-east1] has two.
KINDS: Mapping[str, int] = {
    "source": 1,
    "gpu": 1,
    "machine": 1,
    "link": 1,
    "nic": 1,
    "distance": 1,
    "region": 1,
    "zone": 1,
    "host": 2,
    "accelerator": 2,
    "price": 2,
    "egress": 2,
    "egress_rule": 1,
}
FILES = ("gpus.toml", "machines.toml", "prices.toml", "regions.toml", "network.toml")
UNDATED = "undated"

FactName = tuple[str, ...]
"""The kind of a fact and the names after it, such as ``("gpu", "T4")``."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The values that the files give under one name, and the last file that gave some."""

    name: FactName
    file: str
    values: Mapping[str, Any]
    base_source: str | None = None
    """The source of the values that a user's file did not change."""

    def table(self, problems: Problems) -> Table:
        """Open the fact for reading."""
        document = Document(self.file, {}, "toml")
        table = Table(dict(self.values), document, problems, self.name)
        table.keys_read.update({"source": None, "date": None})
        return table

    @property
    def place(self) -> str:
        return Document(self.file, {}, "toml").place(self.name, is_table=True)


@cache
def built_in_facts() -> Mapping[FactName, Fact]:
    """Read the facts in ``simulator/data``."""
    folder = resources.files("simulator") / "data"
    problems = Problems()
    facts: dict[FactName, Fact] = {}
    for file in FILES:
        raw = tomllib.loads((folder / file).read_text(encoding="utf-8"))
        for fact in _flatten(raw, file=file, problems=problems):
            assert fact.name not in facts, f"{fact.place} is defined twice"
            facts[fact.name] = fact
    problems.raise_if_any()
    return MappingProxyType(facts)


def user_facts(path: Path) -> list[Fact]:
    """Read a user's file of facts."""
    document = load_document(path)
    problems = Problems()
    facts = list(_flatten(document.data, file=document.name, problems=problems))
    problems.raise_if_any()
    return facts


def overlay(below: Mapping[FactName, Fact], above: Iterable[Fact]) -> dict[FactName, Fact]:
    """Merge facts into others key by key; unknown names are added.

    The source of a changed fact names the file and the changed keys, so that no user's figure is
    shown under the name of a vendor.
    """
    merged = dict(below)
    for fact in above:
        known = merged.get(fact.name)
        values: dict[str, Any] = {} if known is None else dict(known.values)
        for key, value in fact.values.items():
            values[key] = _join(values.get(key), value)
        left = None
        if fact.name[0] != "source":
            values["date"] = fact.values.get("date", UNDATED)
            if "source" not in fact.values:
                values["source"] = f"{fact.file} ({', '.join(sorted(fact.values))})"
                left = None if known is None else known.values.get("source")
        merged[fact.name] = Fact(fact.name, fact.file, values, left)
    return merged


def source_and_date(
    fact: Fact, table: Table, sources: Mapping[str, tuple[str, str]]
) -> tuple[str, str]:
    """Return the source and date of a fact, resolving references to ``[source.NAME]``."""
    source = table.value("source", valid_text, required=True) or ""
    date = table.value("date", valid_text) or UNDATED
    if source in sources:
        source, listed_date = sources[source]
        date = listed_date if date == UNDATED else date
    elif date == UNDATED and "date" not in fact.values:
        table.report("date", "is missing")
    if fact.base_source is not None:
        source = f"{source}, else {sources.get(fact.base_source, (fact.base_source, ''))[0]}"
    return source, date


def spelling_key(name: str) -> str:
    """Reduce a name to lower-case letters, digits and ``+``, to compare spellings."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


@dataclass(frozen=True, slots=True)
class Spelling:
    """Canonical names of GPUs and machine types by spelling, aliases included."""

    gpus: Mapping[str, str]
    machines: Mapping[str, str]

    @classmethod
    def of(cls, known: Iterable[Fact]) -> Spelling:
        names: dict[str, dict[str, str]] = {"gpu": {}, "machine": {}}
        # The first to claim a spelling keeps it: built-in before user, names before aliases.
        ranked: list[tuple[bool, bool, str, Fact]] = []
        for fact in known:
            if fact.name[0] in names:
                is_users = fact.file not in FILES
                aliases = fact.values.get("aliases", [])
                ranked.append((is_users, False, fact.name[1], fact))
                for alias in aliases if isinstance(aliases, list) else []:
                    ranked.append((is_users, True, str(alias), fact))
        for _, _, spelling, fact in sorted(ranked, key=lambda one: one[:2]):
            names[fact.name[0]].setdefault(spelling_key(spelling), fact.name[1])
        return cls(names["gpu"], names["machine"])

    def canonical(self, fact: Fact) -> Fact:
        """Return the fact under its canonical name."""
        names = {
            "gpu": self.gpus,
            "accelerator": self.gpus,
            "machine": self.machines,
            "price": self.machines,
        }.get(fact.name[0], {})
        found = names.get(spelling_key(fact.name[1]))
        if found is None:
            return fact
        return replace(fact, name=(fact.name[0], found, *fact.name[2:]))


def _join(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **new}
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    return new


def _flatten(raw: Mapping[str, Any], *, file: str, problems: Problems) -> Iterator[Fact]:
    for kind, body in raw.items():
        depth = KINDS.get(kind)
        if depth is None:
            problems.add(f"{file}: [{kind}]", "is not a kind of fact", nearest(kind, KINDS))
        else:
            yield from _leaves((kind,), body, depth, file=file, problems=problems)


def _leaves(
    name: FactName, body: Any, depth: int, *, file: str, problems: Problems
) -> Iterator[Fact]:
    if not isinstance(body, dict):
        form = ".".join((name[0], *("NAME" for _ in range(KINDS[name[0]]))))
        place = Document(file, {}, "toml").place(name, is_table=True)
        problems.add(place, "is not a table", f"write [{form}] above its keys")
    elif depth == 0:
        yield Fact(name, file, body)
    else:
        for part, inner in body.items():
            yield from _leaves((*name, part), inner, depth - 1, file=file, problems=problems)
