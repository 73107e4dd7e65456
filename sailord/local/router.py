"""The network of a shaped cluster: a network namespace for each node, and a router between them.

``python -m sailord.local.router`` reads requests from its input and answers each, as one line of
JSON. It owns the namespaces and their TUN devices, and carries every packet between them when
``shaper`` says so. (The kernel's netem is often not there, and cannot share a rate between
several senders.) The namespaces have no names: when this process and those within have ended,
however they ended, nothing is left of them. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from agents.daemon.namespaces import enter_network_namespace, leave_network_namespace
from sailord.local.shaper import Path, Queue, Shaper

DEVICE = "wan"
MTU = 9000
NETWORK = "10.77.0"
"""Addresses exist inside the namespaces only."""
NODES_MAX = 250
BURST = 64
"""Packets read from one device before the others are looked at."""
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_PR_SET_TIMERSLACK = 29
_IPV4 = 4


@dataclass(frozen=True, slots=True)
class Port:
    """One node's end of the network, as the router holds it."""

    tun: int
    namespace: int


@dataclass(eq=False)
class Router:
    """Namespaces, devices, and packets on their way."""

    shaper: Shaper = field(default_factory=Shaper)
    ports: dict[str, Port] = field(default_factory=dict)
    _numbers: dict[int, str] = field(default_factory=dict)
    """Nodes by the last number of their address."""
    _names: dict[int, str] = field(default_factory=dict)
    """Nodes by their device."""
    _flying: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """Arrival, a number in order of departure, device of the receiver, and packet."""
    _sent: int = 0
    _given: int = 0

    # ---- requests -------------------------------------------------------------------------------

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        match asked["ask"]:
            case "node":
                return self._add(asked["name"], asked["zone"], asked["nic_bytes_per_s"])
            case "remove":
                self._remove(asked["name"])
            case "link":
                path = Path(Queue(asked["bytes_per_s"]), asked["delay_s"], asked["is_down"])
                self.shaper.paths[asked["from"], asked["to"]] = path
            case _:
                sent = self.shaper.bytes_sent.items()
                return {"bytes": [[*ends, count] for ends, count in sent]}
        return {}

    def _add(self, name: str, zone: str, nic_bytes_per_s: float | None) -> dict[str, Any]:
        if self._given >= NODES_MAX:
            return {"problem": f"the network has addresses for {NODES_MAX} nodes"}
        self._given += 1
        address = f"{NETWORK}.{self._given}"
        port = open_port(address)
        self.ports[name] = port
        self._numbers[self._given], self._names[port.tun] = name, name
        self.shaper.add_node(name, zone, nic_bytes_per_s)
        return {"address": address, "namespace": f"/proc/{os.getpid()}/fd/{port.namespace}"}

    def _remove(self, name: str) -> None:
        """Close a node's device; its namespace ends with the last process in it."""
        port = self.ports.pop(name)
        self._numbers = {number: node for number, node in self._numbers.items() if node != name}
        del self._names[port.tun]
        self._flying = [each for each in self._flying if each[2] != port.tun]
        heapq.heapify(self._flying)
        os.close(port.tun)
        os.close(port.namespace)

    # ---- packets --------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry packets and answer requests until the input ends."""
        requests = sys.stdin.fileno()
        os.set_blocking(requests, False)
        line = b""
        while True:
            wait_s = max(self._flying[0][0] - time.monotonic(), 0.0) if self._flying else None
            ready, _, _ = select.select([requests, *self._names], [], [], wait_s)
            for device in ready:
                if device != requests:
                    self._take(device)
            self._deliver()
            if requests in ready:
                read = os.read(requests, 1 << 16)
                if not read:
                    return
                *lines, line = (line + read).split(b"\n")
                for each in lines:
                    print(json.dumps(self.answer(json.loads(each))), flush=True)

    def _take(self, device: int) -> None:
        """Read packets that a node sends."""
        sender = self._names[device]
        for _ in range(BURST):
            try:
                packet = os.read(device, 1 << 16)
            except OSError:  # None is left.
                return
            receiver = self._numbers.get(packet[19]) if packet[0] >> 4 == _IPV4 else None
            if receiver is None:
                continue
            at = self.shaper.arrival(sender, receiver, len(packet), time.monotonic())
            if at is not None:
                self._sent += 1
                heapq.heappush(self._flying, (at, self._sent, self.ports[receiver].tun, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._flying)
            with contextlib.suppress(OSError):  # A full or closed device loses packets.
                os.write(device, packet)


def open_port(address: str) -> Port:
    """Make a namespace with this address on a TUN device."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        leave_network_namespace()
        try:
            namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
            for words in (
                f"addr add {address}/24 dev {DEVICE}",
                f"link set {DEVICE} mtu {MTU} txqueuelen 2000 up",
                "link set lo up",
            ):
                subprocess.run(["ip", *words.split()], check=True, stdin=subprocess.DEVNULL)
        finally:
            enter_network_namespace(f"/proc/self/fd/{home}")
    finally:
        os.close(home)
    return Port(tun, namespace)


def main() -> None:
    """Serve until the input ends; ahead of training processes, so that delays are kept."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(-15)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    Router().run()


if __name__ == "__main__":
    main()
