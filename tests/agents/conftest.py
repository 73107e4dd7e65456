"""The stores that the contract is tested on, and a key prefix for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.store.interface import Store
from tests.agents.store.places import (
    NEEDS_ETCD,
    Cluster,
    Embedded,
    Place,
    Server,
    Socket,
    wait_answer,
)

SERVERS = ["socket", *(pytest.param(name, marks=NEEDS_ETCD) for name in ("etcd", "cluster"))]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def one_socket() -> Iterator[Socket]:
    """The process of an embedded store, for all tests."""
    with closing(Socket()) as place:
        yield place


@pytest.fixture(scope="session")
def one_etcd() -> Iterator[Cluster]:
    """One etcd member, for all tests."""
    with closing(Cluster()) as place:
        yield place


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[Cluster]:
    """A cluster of three etcd members, for all tests."""
    with closing(Cluster(3)) as place:
        yield place


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    """A store in processes of its own; a test that kills one must restart it."""
    return request.getfixturevalue(f"one_{request.param}")


@pytest.fixture(params=["embedded", *SERVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store."""
    if request.param == "embedded":
        return Embedded(tmp_path)
    return request.getfixturevalue(f"one_{request.param}")


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    """A client of the store."""
    store = await place.open()
    await wait_answer(store)
    yield store
    await store.close()


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"/sailor/v1/test-{next(_numbers)}/"
