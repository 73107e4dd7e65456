"""Fixtures of the worker's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worker.control.fake_agents import ForkServer
from tests.worker.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """``python -m worker`` as a server process that has imported torch."""
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The agents' fork server, with worker processes that have imported torch."""
    from tests.worker.control.fake_agents import ForkServer  # noqa: PLC0415 - loads torch

    process = ForkServer(tmp_path_factory.mktemp("fork-server"))
    yield process
    process.end()


@pytest.fixture(autouse=True, scope="module")
def one_thread_each() -> Iterator[None]:
    """Limit torch to one thread, since ranks are threads or processes already.

    Restored afterwards: what other tests measure depends on the number of threads.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
