"""What all tests share: deterministic random cases, and the optional reference measurements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT.parent / "shared" / "reference"

# `make sim` and `make chaos` raise this; few enough by default that `make test` stays quick.
EXAMPLES = int(os.environ.get("SAILOR_EXAMPLES", "50"))

settings.register_profile(
    "sailor",
    max_examples=EXAMPLES,
    derandomize=True,  # The same commit tries the same cases everywhere.
    database=None,
    deadline=None,  # A slow machine is not a wrong answer.
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sailor")


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of measured runs, or a skip where this checkout stands alone."""
    if not REFERENCE.is_dir():
        pytest.skip("the reference measurements are not beside this checkout")
    return REFERENCE


@pytest.fixture(scope="session")
def examples() -> int:
    """How many random cases a test that draws its own should try."""
    return EXAMPLES
