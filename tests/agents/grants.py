"""What a worker reads with, as the agent of its node gives it."""

from __future__ import annotations

import time

from agents.rpc.grants import make_grant
from agents.rpc.signing import ClusterKey, ticket
from agents.rpc.tls import Tls
from worker.checkpoint.reader import Reader


def reader(
    key: ClusterKey,
    job: str,
    node: str = "b",
    *,
    tls: Tls | None = None,
    at: float | None = None,
) -> Reader:
    """The reader of a job on a node."""
    about = job, 1, node
    at = time.time() if at is None else at
    return Reader(ticket(key, *about, at=at), *make_grant(key, tls, *about, at=at))
