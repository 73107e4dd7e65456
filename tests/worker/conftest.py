"""What tests of the runtime share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.worker.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """``python -m worker``, ready to run as often as one likes."""
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread_each() -> Iterator[None]:
    """Ranks are threads or processes already, and torch's own would only stand in their way.

    What other tests measure depends on how many there are, so they get them back.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
