"""Where the store cannot be reached, sailord tells what it knows, or where more is known."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import ExitStack, closing

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from tests.agents.store.places import NEEDS_ETCD, Cluster
from tests.processes import carry, wait_until
from tests.sailord.daemon.running import JOB, Place

pytestmark = [pytest.mark.slow, NEEDS_ETCD]


class Way:
    """A way to a port of this machine that can be cut for good."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self.to = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for line in (self.listener, *self.lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                self.lines.append(near)
                far = socket.create_connection(self.to)
                self.lines.append(far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()


def is_cut(head: Place) -> bool:
    code, said = head.ask("GET", "/readyz")
    return code == 503 and "the store" in str(said)


def typed(head: Place, *words: str) -> str:
    return CliRunner().invoke(main, [*words, "--server", f"unix://{head.socket}"]).output


def test_api_answers_from_memory_while_the_store_is_unavailable(tmp_path):
    """First from a standby alone, which asks the leader; then from the leader too."""
    with ExitStack() as stack:
        etcd = stack.enter_context(closing(Cluster()))
        near, far = (stack.enter_context(closing(Way(etcd.endpoints[0]))) for _ in range(2))
        leader, other = (
            Place(tmp_path, name=name, store=f"etcd://127.0.0.1:{way.port}", options="")
            for name, way in (("one", near), ("two", far))
        )
        for each in (leader, other):
            stack.callback(each.stop_all)
            each.start()
            wait_until(lambda each=each: each.ask("GET", "/readyz")[1].get("ready"))
            if each is leader:
                wait_until(lambda: leader.ask("GET", "/readyz")[1]["leads"])
        # It has a way of its own, and outlives that of its sailord.
        leader.store_url = etcd.url
        leader.start_agent("a")
        wait_until(lambda: leader.status()["nodes"].get("ready"))
        assert leader.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
        wait_until(lambda: "running" in str(leader.ask("GET", "/v1/jobs/j")[1].get("phase")))
        paths = ("/v1/jobs/j/plan", "/v1/jobs/j/history", "/v1/jobs/j/why")
        plan, history, why = (leader.ask("GET", path)[1] for path in paths)
        assert history["store_away_since"] is None
        wait_until(lambda: leader.ask("GET", "/v1/jobs/j/moves")[1]["moves"])
        moves = leader.ask("GET", "/v1/jobs/j/moves")[1]
        assert moves["store_away_since"] is None
        assert why["plan"]

        far.close()
        wait_until(lambda: is_cut(other))
        assert other.ask("GET", "/v1/jobs/j")[0] == 200, "a job that runs is there"
        assert other.status()["job"]["id"] == "j"

        near.close()
        wait_until(lambda: is_cut(leader))
        # Also after its lease: the last leader has the newest state.
        wait_until(lambda: not leader.status()["leads"])
        for head in (leader, other):
            assert head.ask("GET", paths[0]) == (200, plan)
            code, told = head.ask("GET", paths[1])
            assert code == 200
            assert told["store_away_since"] > 0
            told_texts = [line["text"] for line in told["history"]]
            assert any("generation 1 on 1 node" in text for text in told_texts)
            assert set(told_texts) >= {
                each["text"] for each in history["history"] if not each["move"]
            }
            code, told = head.ask("GET", paths[2])
            assert (code, told["plan"]) == (200, why["plan"])
            assert "shown from sailord's memory" in typed(head, "why", "j")
            assert "shown from sailord's memory" in typed(head, "history", "j")
            code, told = head.ask("GET", "/v1/jobs/j/moves")
            assert (code, told["moves"]) == (200, moves["moves"])
            assert told["store_away_since"] > 0
            said = typed(head, "moves", "j")
            assert "start → generation 1" in said
            assert "shown from sailord's memory" in said

        leader.processes[0].kill()
        leader.processes[0].wait()
        for path in ("/v1/jobs/j", "/v1/status"):
            code, said = other.ask("GET", path)
            assert code == 503, "nothing is worse than to say that there is no job"
            assert "does not answer" in said["problems"][0]["what"]
            assert "ask another sailord" in said["problems"][0]["cure"]
