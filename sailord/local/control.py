"""The launcher's end of the control socket of ``sailorctl up``: one line of JSON each way."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from dataclasses import dataclass
from typing import Any

from sailord.local.cluster import ClusterError, LocalCluster
from sailord.local.zone_file import EmulatedLink
from simulator.documents.problems import InputError

HEARD_S = 1.0
LINE_BYTES_MAX = 4096


@dataclass(eq=False)
class Control:
    """The server's end of the control socket."""

    cluster: LocalCluster
    listener: socket.socket

    def serve(self, wait_s: float) -> str | None:
        """Serve one request within this time; return what was done, for the log."""
        if not select.select([self.listener], [], [], wait_s)[0]:
            return None
        connection, _ = self.listener.accept()
        done: str | None = None
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(HEARD_S)
            with connection.makefile("rb") as lines:
                asked = json.loads(lines.readline(LINE_BYTES_MAX))
            try:
                done = self._do(asked)
                answer = {"done": done}
            except InputError as error:
                answer = {"problem": "\n".join(map(str, error.problems))}
            except ClusterError as error:
                answer = {"problem": str(error)}
            connection.sendall(json.dumps(answer).encode() + b"\n")
        return done

    def _do(self, asked: dict[str, Any]) -> str:
        if asked["ask"] == "add":
            name = self.cluster.add_node(asked["kind"], asked["zone"])
            return f"{name} is starting: one {asked['kind']} GPU in {asked['zone']}"
        if asked["ask"] == "link":
            one, other = asked["one"], asked["other"]
            link = EmulatedLink(asked["delay_ms"], asked["mbit_per_s"])
            self.cluster.set_link(one, other, None if asked["is_down"] else link)
            return f"the link between {one} and {other} is {'down' if asked['is_down'] else 'set'}"
        name = asked["node"]
        if name not in self.cluster.nodes:
            raise ClusterError(f"there is no node {name}; nodes: {', '.join(self.cluster.nodes)}")
        self.cluster.kill_node(name)
        return f"{name} is killed, and its memory is lost"


def listen(cluster: LocalCluster) -> Control:
    """Open the control socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(cluster.place.control))
    listener.listen(8)
    return Control(cluster, listener)
