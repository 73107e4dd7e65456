"""Bounds the memory of copied parts of layers, which are summed or sent while others are copied."""

from __future__ import annotations

import time

from simulator.hardware.runtime_constants import RUNTIMES
from worker.distributed.interface import PendingOperation, Transport

COPIES_BYTES_MAX = int(2 * RUNTIMES["sailor"].sync_bucket_bytes)
"""The most bytes of copies at once, as the simulator counts them, unless one copy has more."""
_POLL_S = 0.0005


def wait_until_done(pending: PendingOperation, transport: Transport) -> None:
    """Wait on the host, so that the memory of the operation's tensors is free afterwards.

    Under NCCL ``wait`` blocks the device alone, and the library keeps the tensors until the device
    has come that far.
    """
    pending.wait()
    while not pending.is_done():
        transport.check()
        time.sleep(_POLL_S)
