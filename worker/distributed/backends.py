"""Opens, aborts and closes groups of ranks: gloo on CPUs, NCCL on GPUs.

The two have opposite rules. A gloo operation blocks the host, and raises if a peer is lost; its
``abort`` ends no wait. An NCCL operation is a kernel: it blocks the device, ends without an error
when its communicator is aborted, and otherwise waits forever; only if NCCL has seen a connection
close before does a wait for it raise. Making a communicator blocks the host
until all members take part, and cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from worker.distributed.operations import StartedOperation

_Gloo: Any = ProcessGroupGloo  # torch's type stubs miss half of its attributes.
_UNUSED_TAG = 2
_LOOK = timedelta(milliseconds=250)
"""How often a wait for a collective looks whether the generation has failed."""
_NO_LIMIT = timedelta(0)
"""Means to torch that a wait ends with its operation alone."""
_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface."""
_BEGIN_S = 1.0
"""Seconds in which the first of several calls begins, unless its thread has failed."""
_HEAD_START_S = 0.02
"""Seconds for the first of several calls to take effect, once it has begun."""

GLOO_READS_AT_ONCE = "GLOO_ENABLE_STORE_V2_API"
"""If on, a member of a group reads the addresses of all others at once. Otherwise it takes several
round trips to the store for each, one after the other. All ranks need the same."""

NCCL_SETTINGS = {
    # torch's watchdog ends the process after an error or a timeout. Survivors of a lost peer must
    # go on: our own monitor detects the loss and aborts the communicators.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # If on, it switches error handling on again.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # Ends a process whose watchdog is stuck.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # Ends a process after it has written the dump.
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",  # Newer versions: after a timeout, whatever else is set.
    # After an error the watchdog sleeps four times this long, by default for a minute, and the
    # thread that lets go of the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # A channel carries one direction between two ranks, so transfers on it are to run in order.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # In the watchdog's thread, which ends the process.
}
"""Set in the environment before the first group, whatever was set there."""
NCCL_DEFAULTS = {
    # Otherwise the first use of another algorithm connects, and blocks the host, in mid-step.
    "NCCL_RUNTIME_CONNECT": "0",
    # The recorder of operations keeps a trace of each one's caller, which takes time in each, and
    # after an error seconds to print. Ours names the rank that hangs.
    "TORCH_FR_BUFFER_SIZE": "0",
}
"""Set unless the environment has another value."""
OLD_RECORDER = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The recorder's size under its older name, which torch reads only where the newer is not set."""


class Backends(Protocol):
    """Makes and breaks the groups of one library."""

    uses_channels: bool
    """Whether transfers within a group run in order, so that each direction between two ranks needs
    a group of its own. If not, all transfers share the group of all ranks."""
    blocks_device: bool
    """Whether waits return at once and never fail, since the device waits until the group is
    aborted."""

    def open(self, name: str, store: Store, index: int, size: int) -> Any:
        """Make a group, as its member ``index``; blocks until all members do so."""

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        """Start to sum each rank's part over all ranks; return the library's handle."""

    def enter_thread(self) -> None:
        """Prepare a new thread for calls to the library."""

    def wait(self, operation: StartedOperation, has_failed: Callable[[], bool]) -> bool:
        """Wait for an operation; return False if it goes on although the generation has failed."""

    def abort(self, groups: Sequence[Any]) -> list[threading.Thread]:
        """Abort all pending operations; return the threads that are still at it.

        The first group's abort begins before the others'.
        """

    def close(self, groups: list[Any]) -> list[threading.Thread]:
        """Close groups and let go of them; return the threads that are still at it."""


class GlooBackends:
    """Gloo, on CPUs."""

    uses_channels = False
    blocks_device = False

    def __init__(self, host: str, deadline_s: float) -> None:
        os.environ[GLOO_READS_AT_ONCE] = "1"
        self._device = _Gloo.create_device(hostname=host)
        self._timeout = timedelta(seconds=deadline_s)

    def open(self, name: str, store: Store, index: int, size: int) -> Any:  # noqa: ARG002 - the store's prefix names it
        options = _Gloo._Options()
        options._timeout = self._timeout
        options._devices = [self._device]
        options._threads = 1
        return _Gloo(store, index, size, options)

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        """Send each rank its part, and add those that come.

        Gloo's own reduce-scatter sums all parts on all ranks, and a wait for it cannot be ended.
        """
        return _SumOfParts(group, parts, into)

    def enter_thread(self) -> None:
        """Gloo needs nothing."""

    def wait(self, operation: StartedOperation, has_failed: Callable[[], bool]) -> bool:
        """Wait for an operation, also for one that gloo never ends.

        What a rank sends while its peer's connection closes may wait for the whole timeout, in
        gloo's own thread; after a failure a collective is left to it. A transfer has no such
        thread, and a timeout of its wait would end all others.
        """
        if operation.is_transfer:
            operation.work.wait()
            return True
        had_failed = False
        while True:
            try:
                operation.work.wait(_LOOK)
                return True
            except RuntimeError:
                if operation.work.is_completed():
                    operation.work.wait()  # Raises the operation's error, not the look's timeout.
                    return True
                if had_failed:
                    return False
                had_failed = has_failed()

    def abort(self, groups: Sequence[Any]) -> list[threading.Thread]:
        """Close the connections: a receive that times out closes all of a group's.

        Gloo's own ``abort`` does not end pending waits.
        """
        for group in groups:
            if group.size() == 1:
                continue
            peer = (group.rank() + 1) % group.size()
            try:
                group.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue
        return []

    def close(self, groups: list[Any]) -> list[threading.Thread]:
        def let_go() -> None:
            while groups:
                groups.pop().shutdown()

        return at_once([let_go], self.enter_thread)


class _SumOfParts:
    """The exchange of parts between ranks, and their sum once they have come."""

    def __init__(self, group: Any, parts: Tensor, into: Tensor) -> None:
        self._arrived, self._into = torch.empty_like(parts), into
        # Without sizes, each rank sends and receives equal parts.
        self._work = group.alltoall_base(self._arrived.view(-1), parts.view(-1), [], [])

    def wait(self, timeout: timedelta = _NO_LIMIT) -> None:
        self._work.wait(timeout)
        torch.sum(self._arrived, 0, out=self._into)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class NcclBackends:
    """NCCL, on one GPU of each process."""

    uses_channels = True
    blocks_device = True

    def __init__(self, device: torch.device, host: str, deadline_s: float) -> None:
        prepare_environment(host)
        self._device = device
        self._timeout = timedelta(seconds=deadline_s)

    def open(self, name: str, store: Store, index: int, size: int) -> Any:  # noqa: ARG002 - the store's prefix names it
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - CPU builds have none

        # Streams of another pool than that of snapshots: torch shares the streams of a pool.
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        group: Any = ProcessGroupNCCL(store, index, size, options)
        group.eager_connect_single_device(self._device)
        return group

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        return group._reduce_scatter_base(into, parts)

    def wait(self, operation: StartedOperation, _: Callable[[], bool]) -> bool:
        operation.work.wait()
        return True

    def enter_thread(self) -> None:
        """Select the GPU; a new thread would use GPU 0, and open a CUDA context there."""
        torch.cuda.set_device(self._device)

    def abort(self, groups: Sequence[Any]) -> list[threading.Thread]:
        """Abort all communicators at once.

        An abort may wait for the whole device, which a kernel of another communicator blocks until
        that one is aborted. So each has a thread of its own, and none waits for the first to end.
        """
        return at_once([group.abort for group in groups], self.enter_thread)

    def close(self, groups: list[Any]) -> list[threading.Thread]:
        return at_once([group.shutdown for group in groups], self.enter_thread)


def prepare_environment(host: str = "") -> None:
    """Set how torch and NCCL handle errors and connect; both read it when they make a group."""
    os.environ.update(NCCL_SETTINGS)
    if (asked := os.environ.get(OLD_RECORDER)) is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", asked)
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    interface = interface_of(host) if host else None
    if interface is not None:
        # Of several interfaces NCCL may take one that other nodes cannot reach, as of containers.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_of(host: str) -> str | None:
    """Return the network interface that has the address of ``host``; ``None``: none is found."""
    try:
        wanted = {ip_address(str(each[4][0])) for each in socket.getaddrinfo(host, 0)}
    except (OSError, ValueError):
        return None
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError:
                continue  # It has no IPv4 address.
        if ip_address(answer[20:24]) in wanted:
            return name
    with contextlib.suppress(OSError), Path("/proc/net/if_inet6").open(encoding="ascii") as lines:
        for address, *_, name in map(str.split, lines):
            if ip_address(bytes.fromhex(address)) in wanted:
                return name
    return None


def at_once(calls: Sequence[Any], enter_thread: Any = lambda: None) -> list[threading.Thread]:
    """Run calls that may block, each in a thread of its own; the first begins before the others."""
    begun = threading.Event()

    def run(call: Any) -> None:
        enter_thread()
        begun.set()
        try:
            call()
        except RuntimeError as error:
            # The group is abandoned in any case.
            print(f"closing a group: {str(error).partition(chr(10))[0]}", flush=True)

    threads = [
        threading.Thread(target=run, args=(call,), daemon=True, name="closing a group")
        for call in calls
    ]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 0:
            begun.wait(_BEGIN_S)
            thread.join(_HEAD_START_S)
    return threads
