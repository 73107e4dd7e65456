"""The stores that the contract is tried on, and a prefix of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from agents.store import Store
from tests.store.places import Embedded, Place, Server, Socket

SERVERS = {"socket": Socket}
_numbers = itertools.count()


@pytest.fixture(scope="session", params=[*SERVERS])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A store in processes of its own, which a test may kill and must start again."""
    server = SERVERS[request.param]()
    yield server
    server.close()


@pytest.fixture(params=["embedded", *SERVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Any store."""
    if request.param == "embedded":
        yield Embedded(tmp_path)
        return
    yield request.getfixturevalue(f"one_{request.param}")


@pytest.fixture(scope="session")
def one_socket() -> Iterator[Place]:
    """One server for all tests of the contract: none of them kills it."""
    place = Socket()
    yield place
    place.close()


@pytest_asyncio.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    """A way to the place."""
    store = await place.open()
    yield store
    await store.close()


@pytest.fixture
def prefix() -> str:
    """Keys of this test alone."""
    return f"/sailor/v1/test-{next(_numbers)}/"
