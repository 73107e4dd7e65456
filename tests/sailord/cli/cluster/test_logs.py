"""Logs of workers that have ended: a line says that there are some, and an option shows them."""

from __future__ import annotations

from contextlib import closing

from click.testing import CliRunner, Result

from sailord.cli.main import main
from tests.local_http import LocalServer, QuietHandler


class Head(LocalServer):
    """Answers as a sailord one of whose nodes keeps logs of two workers that ended."""

    def __init__(self, ended: str | None) -> None:
        super().__init__(Answer)
        self.ended = ended
        self.asked: list[str] = []


class Answer(QuietHandler):
    server: Head

    def reply(self) -> None:
        self.server.asked.append(self.path)
        body = b"step 9\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Sailor-Log-Mark", "0:j.4.0:7")
        if self.server.ended is not None:
            self.send_header("Sailor-Log-Ended", self.server.ended)
        self.end_headers()
        self.wfile.write(body)


def logs(*words: str, ended: str | None = "2") -> tuple[Result, list[str]]:
    with closing(Head(ended)) as head:
        server = f"http://127.0.0.1:{head.server_port}"
        return CliRunner().invoke(main, ["logs", "b1", *words, "--server", server]), head.asked


def test_a_line_says_that_workers_which_ended_have_logs_and_how_to_see_them() -> None:
    shown, _ = logs()
    assert shown.stdout == "step 9\n"
    said = "logs of 2 workers that ended before are kept there: sailorctl logs b1 --ended\n"
    assert shown.stderr == said
    as_json, _ = logs("--json")
    assert as_json.stderr == ""


def test_logs_of_workers_that_ended_are_asked_for_alone() -> None:
    shown, asked = logs("--ended")
    assert asked == ["/v1/nodes/b1/logs?after=&ended=true"]
    assert (shown.stdout, shown.stderr) == ("step 9\n", "")
    for word in (["-f"], ["--setup"], ["--rank", "0"]):
        assert logs("--ended", *word)[0].exit_code == 2


def test_an_older_sailord_that_shows_other_logs_is_told() -> None:
    """It answers with those of the present generation."""
    shown, _ = logs("--ended", ended=None)
    assert shown.exit_code == 2
    assert "sailord: is older than this command, and shows no logs of ended workers" in shown.stderr
    assert logs(ended=None)[0].stdout == "step 9\n"
