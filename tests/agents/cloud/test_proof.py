"""An instance asks its cloud for a proof of which one it is."""

from __future__ import annotations

import aiohttp

from agents.cloud import gce_metadata
from agents.cloud.gce_metadata import read_proof
from tests.fakes.metadata import metadata_server


async def test_a_proof_is_for_the_audience(monkeypatch):
    async with metadata_server() as server, aiohttp.ClientSession() as session:
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)
        assert await read_proof(session, "us#1") is None, "it has no account"
        server.prove = lambda audience: f"for {audience}"
        server.fails = 1
        assert await read_proof(session, "us#1") == "for us#1"


async def test_a_machine_of_no_cloud_has_no_proof(monkeypatch):
    monkeypatch.setattr(gce_metadata, "PROOF_S", 0.2)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    async with aiohttp.ClientSession() as session:
        assert await read_proof(session, "us") is None
