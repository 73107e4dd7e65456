"""Attacks on a real sailord and real agents; ``make attack`` prints what each of them cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sailord.authority import Authority
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
Cost = Callable[[str, str, str], None]
MINUTES = float(os.environ.get("SAILOR_ATTACK_MINUTES", "0"))
"""How long the worst attack goes on; 0: some seconds, and nothing is measured."""


@pytest.fixture
def cost(request) -> Cost:
    """Note what an attack cost before it was refused, and what it costs now."""

    def note(attack: str, before: str, now: str) -> None:
        request.config.stash.setdefault(ROWS, []).append((attack, before, now))

    return note


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print the table at the end of ``make attack``."""
    rows = config.stash.get(ROWS, [])
    if not rows or not MINUTES:
        return
    rows = [("attack", "before", "now, as measured"), *rows]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    terminalreporter.section("attacks")
    for attack, before, now in rows:
        terminalreporter.write_line(f"{attack:{wide[0]}}  {before:{wide[1]}}  {now}")


@pytest.fixture
def head(tmp_path) -> Iterator[Place]:
    """A sailord that leads."""
    place = Place(tmp_path)
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    yield place
    place.stop_all()


@pytest.fixture
def tls_head(tmp_path) -> Iterator[Place]:
    """A sailord that leads and has an authority; the folder ``alice`` is a user's."""
    authority = Authority.create(tmp_path / "ca", "test")
    authority.issue("user", "alice", tmp_path / "alice")
    place = Place(tmp_path, webhooks='[tls]\nauthority = "ca"\n')
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    yield place
    place.stop_all()
