"""One cluster that trains, for all tests of the page in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.control.cluster import Cluster
from tests.sailord.daemon.running import TOKEN, Place
from tests.sailord.page.browser import Tab, open_browser

Play = Callable[[Tab], Awaitable[None]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("page")
    head = Place(folder)
    text = head.config.read_text(encoding="utf-8")
    head.config.write_text(text.replace("[listen]\n", '[listen]\ntokens = "tokens"\n'))
    made = Cluster(folder, [head])
    try:
        made.begin("a1", "a2", "b1", "b2")
        yield made
    finally:
        made.end()


@pytest.fixture
def browse(cluster: Cluster, tmp_path: Path) -> Callable[..., None]:
    """Play something in a browser that is signed in and live."""

    def run(play: Play, *, token: str = TOKEN) -> None:
        async def go() -> None:
            async with open_browser(tmp_path) as tab:
                await tab.screen(1280, 900)
                await tab.open(f"http://127.0.0.1:{cluster.head.port}/#token={token}")
                await tab.wait("document.body.dataset.connection === 'live'")
                await play(tab)

        asyncio.run(go())

    return run
