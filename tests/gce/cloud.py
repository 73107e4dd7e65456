"""A fake cloud with the real client pointed at it, shared by most tests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace

from google.auth.credentials import AnonymousCredentials

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.provider import GceProvider
from sailord.providers.interface import InstanceRequest, Pool
from simulator.hardware.catalogue import load_catalogue
from tests.fakes.gce.cloud import Cloud
from tests.fakes.gce.rest import Rest
from tests.fakes.gce.server import gce_server

HERE, THERE = "us-central1-a", "us-central1-b"


def pool(zone: str = HERE, machine: str = "a2-highgpu-1g", *, spot: bool = True) -> Pool:
    """A pool of machines with A100s."""
    return Pool(zone, machine, "A100-40", int(machine.rpartition("-")[2][:-1]), spot)


def ask(
    count: int = 1, *, of: Pool | None = None, number: int = 0, request_id: str | None = None
) -> InstanceRequest:
    """An ask; each number is a request of its own."""
    return InstanceRequest(request_id or str(uuid.UUID(int=number + 1)), of or pool(), count)


def config(address: str, *pools: Pool) -> GceConfig:
    """A configuration with short times."""
    return GceConfig(
        project="test-project",
        cluster_name="prod",
        pools=pools or (pool(), pool(THERE), pool(spot=False)),
        store="etcd://10.0.0.1:2379",
        key_secret="projects/test-project/secrets/key/versions/1",
        package="sailor[worker]==0.1.0",
        endpoint=address,
        billing_endpoint=address,
        quotas_endpoint=address,
        iam_endpoint=address,
        call_s=10.0,
        operation_s=10.0,
        poll_s=0.02,
    )


@contextlib.contextmanager
def provider(
    cloud: Cloud, *pools: Pool, rest: Rest | None = None, **changes: object
) -> Iterator[GceProvider]:
    """The real provider, which speaks to a fake cloud."""
    with gce_server(cloud, rest) as address:
        settled = replace(config(address, *pools), **changes)
        client = GceClient(AnonymousCredentials(), settled)
        yield GceProvider(settled, load_catalogue(), client)
