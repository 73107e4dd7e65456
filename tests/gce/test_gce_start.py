"""What a mistake in the provider's table does to a sailord that starts (``gce``)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agents.keys import Keys
from agents.store import Entry, StoreUnavailable
from agents.wire import encode
from sailord.capacity_model import Books, Machine, Policy
from sailord.procuring import Procurer
from sailord.providers.interface import Instance
from simulator.errors import InputError
from tests.fakes.gce.cloud import Cloud, Mood
from tests.gce.cloud import pool, provider

RENTED = Books(
    machines=(
        Machine(
            Instance("7", "m7", pool(), "running", 0.0, "t1-1"),
            usd_per_hour=1.0,
            priced_from=0.0,
            known_since=0.0,
        ),
    )
)


class Store:
    """A store with the books of whoever led before."""

    def __init__(self, books: Books | None) -> None:
        self.books = books

    async def get(self, key: str) -> Entry | None:
        if self.books is None:
            raise StoreUnavailable("away")
        return Entry(key, encode(self.books), 1, 1)


def start(cloud: Cloud, books: Books | None) -> None:
    """Do what sailord does before it opens its doors."""
    gateway = SimpleNamespace(keys=Keys("prod"), store=Store(books))
    with provider(cloud) as gce:
        clock = SimpleNamespace(now=lambda: 0.0)
        asyncio.run(Procurer(None, gce, Policy(), None, gateway, clock, lambda: False).check())


def test_gce_who_has_rented_nothing_is_told_at_once():
    with pytest.raises(InputError, match="gcloud auth"):
        start(Cloud(is_expired=True), Books())


@pytest.mark.parametrize("books", [RENTED, None], ids=["machines", "no store"])
def test_gce_who_may_have_machines_leads_them_whatever_is_wrong(books):
    start(Cloud(is_expired=True), books)


def test_gce_a_cloud_that_is_away_keeps_nobody_from_starting():
    start(Cloud(moods=[Mood(".*", 1000, status=503)]), Books())
