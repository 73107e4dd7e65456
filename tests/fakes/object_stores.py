"""Servers of object stores, and the environment in which real clients find them.

S3 is moto's server, Google Cloud Storage is ours (``tests/fakes/gcs.py``). Each has one bucket,
``bucket``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from tests.fakes.gcs import FakeGcs


@contextmanager
def object_stores() -> Iterator[FakeGcs]:
    """Serve both, for this process and those that it starts."""
    gcs, moto = FakeGcs("bucket"), ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    gcs.start()
    moto.start()
    host, port = moto.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": gcs.address,
        # Else gcsfs asks another service, over gRPC, what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            # The servers of one process share their buckets.
            fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)
            yield gcs
    finally:
        for name in ("s3", "gs"):
            fsspec.get_filesystem_class(name).clear_instance_cache()
        moto.stop()
        gcs.stop()
