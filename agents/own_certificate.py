"""This node's own certificate: its enrolment, and its renewal while the agent runs."""

from __future__ import annotations

import contextlib
from functools import partial

import aiohttp

from agents.cloud.gce_metadata import read_proof
from agents.config import Config
from agents.daemon.tasks import Tasks
from agents.rpc.enrolment import Enrolment, keep_copies
from agents.rpc.identity import Identity
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import Tls


async def open_tls(
    config: Config,
    key: ClusterKey,
    session: aiohttp.ClientSession,
    stack: contextlib.AsyncExitStack,
) -> Tls | None:
    """Open this node's certificate, and have it renewed; ``None``: plain HTTP."""
    if config.tls is None:
        return None
    owner = Identity(config.cluster_name, "agent", config.name)
    enrolment = Enrolment(config.tls, owner, key, session, partial(read_proof, session))
    tls, tasks = await enrolment.first(), Tasks()
    stack.callback(tasks.cancel)
    tasks.start(enrolment.keep(tls))
    if config.worker_folder is not None:
        tasks.start(keep_copies(config.tls.files, config.shared / "tls"))
    return tls
