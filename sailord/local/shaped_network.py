"""The launcher's side of the router: makes nodes' namespaces, and sets links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sailord.local.zone_file import EmulatedLink, Zones
from simulator.documents.problems import InputError, Problem, Problems

MBIT = 125_000.0
TUN = Path("/dev/net/tun")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is in the network."""

    address: str
    namespace: str


@dataclass(eq=False)
class ShapedNetwork:
    """The network of a shaped cluster."""

    zones: Zones
    process: subprocess.Popen[bytes]
    """The router; it ends when its input does."""

    def begin(self) -> None:
        """Set all links."""
        for zone in self.zones.zones.values():
            self.set_link(zone.name, zone.name, EmulatedLink(zone.delay_ms))
        for (begin, end), link in self.zones.links.items():
            self.set_link(begin, end, link)

    def add_node(self, name: str, zone: str, nic_mbit_per_s: float | None = None) -> NodeAddress:
        """Make a namespace for a node."""
        rate = {"nic_bytes_per_s": nic_mbit_per_s and nic_mbit_per_s * MBIT}
        return NodeAddress(**self._ask(ask="node", name=name, zone=zone, **rate))

    def remove_node(self, name: str) -> None:
        """Disconnect a node."""
        self._ask(ask="remove", name=name)

    def set_link(self, begin: str, end: str, link: EmulatedLink, *, is_down: bool = False) -> None:
        """Set one direction between two zones."""
        self._ask(
            ask="link",
            delay_s=link.delay_ms / 1e3,
            bytes_per_s=link.mbit_per_s and link.mbit_per_s * MBIT,
            is_down=is_down,
            **{"from": begin, "to": end},
        )

    def bytes_sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes of packets not dropped so far, by sending and receiving node."""
        return {(begin, end): count for begin, end, count in self._ask(ask="bytes")["bytes"]}

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BrokenPipeError("the router ended")
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise InputError(Problem("zones", answer["problem"]))
        return answer


def check_can_shape() -> None:
    """Raise ``InputError`` unless this computer lets us make networks."""
    problems = Problems()
    if os.geteuid() != 0:
        problems.add("zones", "need root, to make network namespaces", "run with sudo, or leave"
                     " --zones out")  # fmt: skip
    if not TUN.exists():
        problems.add("zones", f"need {TUN}", "load the kernel's module: modprobe tun")
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            problems.add("zones", f"need the program {program}", f"install {package}")
    problems.raise_if_any()
