"""What a mistake in [provider] does when sailord starts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from agents.protocol.codec import encode
from agents.protocol.store_keys import Keys
from agents.store.interface import Entry, StoreUnavailable
from sailord.capacity.core.model import CapacityPolicy, CapacityRecord
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.loop import CapacityLoop
from sailord.local.paths import LocalFolders
from sailord.main import main
from sailord.providers.gce.provider import open_gce
from sailord.providers.interface import Instance
from simulator.documents.problems import InputError
from tests.fakes.gce.cloud import Cloud, InjectedFailure, Offer
from tests.fakes.gce.server import gce_server
from tests.gce.cloud import pool, provider
from tests.gce.rented_cluster import LARGE, configure

RENTED = CapacityRecord(
    machines=(
        RentedInstance(
            Instance("7", "m7", pool(), "running", 0.0, "t1-1"),
            usd_per_hour=1.0,
            priced_from=0.0,
            known_since=0.0,
        ),
    )
)


class Store:
    """A store with the capacity records of an earlier leader."""

    def __init__(self, books: CapacityRecord | None) -> None:
        self.books = books

    async def get(self, key: str) -> Entry | None:
        if self.books is None:
            raise StoreUnavailable("away")
        return Entry(key, encode(self.books), 1, 1)


def start(cloud: Cloud, books: CapacityRecord | None) -> None:
    """Do what sailord does before it opens its doors."""
    gateway = SimpleNamespace(keys=Keys("prod"), store=Store(books))
    with provider(cloud) as gce:
        clock = SimpleNamespace(now=lambda: 0.0)
        asyncio.run(CapacityLoop(None, gce, CapacityPolicy(), None, None, gateway, clock).check())


@pytest.mark.slow
def test_a_provider_mistake_stops_a_start_without_instances():
    with pytest.raises(InputError, match="gcloud auth"):
        start(Cloud(is_expired=True), CapacityRecord())


@pytest.mark.parametrize("books", [RENTED, None], ids=["machines", "no store"])
def test_a_provider_mistake_does_not_stop_a_start_with_instances(books):
    start(Cloud(is_expired=True), books)


def test_an_unreachable_cloud_does_not_stop_a_start():
    start(Cloud(failures=[InjectedFailure(".*", 1000, status=503)]), CapacityRecord())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behave", "code", "words"),
    [
        ({}, 0, "is valid"),
        ({"is_expired": True}, 2, "error: provider.credentials"),
        (
            {"failures": [InjectedFailure(".*", 1000, status=503)]},
            1,
            "the provider does not answer",
        ),
        (None, 2, "error: provider: is not configured"),
    ],
    ids=["well", "expired", "away", "none"],
)
def test_sailord_check_asks_the_provider(tmp_path, behave, code, words):
    cloud = Cloud(offers={LARGE: Offer("nvidia-tesla-a100", 1, "NVIDIA_A100_GPUS", 2.0, 0.8)})
    for name, value in (behave or {}).items():
        setattr(cloud, name, value)
    place = LocalFolders(tmp_path / "c")
    place.make()
    file = str(place.folder / "sailord.toml")
    try:
        with gce_server(cloud) as address:
            if behave is not None:
                configure(place, address, capacity="")
            assert CliRunner().invoke(main, ["check", "--config", file]).exit_code == 0
            assert cloud.asked == [], "reading the file alone sends no request"
            done = CliRunner().invoke(main, ["check", "--provider", "--config", file])
    finally:
        place.remove()
    assert (done.exit_code, words in done.output) == (code, True), done.output


def test_sailord_check_warns_of_unreadable_prices(tmp_path, monkeypatch):
    cloud = Cloud(
        offers={LARGE: Offer("nvidia-tesla-a100", 1, "NVIDIA_A100_GPUS", 2.0, 0.8)},
        denied={"billing"},
    )
    place = LocalFolders(tmp_path / "c")
    place.make()
    try:
        with gce_server(cloud) as address:
            configure(place, address, capacity="")

            def opened(config, *others):
                return open_gce(replace(config, billing=True, billing_endpoint=address), *others)

            monkeypatch.setattr("sailord.providers.gce.provider.open_gce", opened)
            file = str(place.folder / "sailord.toml")
            done = CliRunner().invoke(main, ["check", "--provider", "--config", file])
    finally:
        place.remove()
    assert done.exit_code == 0
    assert "warning: provider.billing: cannot be read" in done.output
    assert "gcloud services enable cloudbilling.googleapis.com" in done.output
    assert "is valid" in done.output
