"""Every program of benchmarks can start."""

from __future__ import annotations

import importlib

import pytest

from tests.python_files import ROOT, modules

NAMES = [module.name for module in modules(ROOT, ("benchmarks",))]
EXTRAS = ("torch", "matplotlib")


@pytest.mark.parametrize("name", NAMES)
def test_module_can_be_imported_as_make_bench_does(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"needs {missing.name}")
