"""What tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """``python -m worker``, ready to run as often as one likes."""
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()
