"""Small changes are ones: each leaves a module that can be read, and means something else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.mutations import ROOT
from tests.mutations.small_changes import changes_of, modules

TEXT = """
def f(a, b):
    if a and not b:  # ü
        return max(a, b) > 3
    return replace(a, x=1, y=2)
"""


def test_every_kind_of_small_change_is_made() -> None:
    told = [each.told(TEXT.encode()).split(":", 2)[2].strip() for each in changes_of("m", TEXT)]
    assert sorted(told) == sorted(
        [
            "a and not b  ->  True",
            "a and not b  ->  False",
            "a and not b  ->  (not b)",
            "a and not b  ->  (a)",
            "max  ->  min",
            "max(a, b) > 3  ->  True",
            "max(a, b) > 3  ->  False",
            "replace(a, x=1, y=2)  ->  replace(a, y=2)",
            "replace(a, x=1, y=2)  ->  replace(a, x=1)",
        ]
    )


@pytest.mark.parametrize("path", modules())
def test_each_change_leaves_a_valid_and_different_module(path: str) -> None:
    text = Path(ROOT, path).read_text(encoding="utf-8")
    before = ast.dump(ast.parse(text))
    found = list(changes_of(path, text))
    assert found
    for each in found[::20]:
        assert ast.dump(ast.parse(each.of(text.encode()))) != before, each
