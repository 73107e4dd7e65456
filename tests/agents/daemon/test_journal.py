"""Lines in systemd's journal: a real socket takes the journal's place."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import structlog

from agents.daemon import journal
from agents.daemon.journal import Journal, is_journal
from agents.daemon.logs import begin_log


def parts(message: bytes) -> dict[str, str]:
    found, rest = {}, message
    while rest:
        line, _, rest = rest.partition(b"\n")
        key, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        found[key.decode()] = value.decode()
    return found


@pytest.fixture
def received(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "socket"))
        end.settimeout(10)
        yield end


def test_a_line_has_its_priority_and_fields(tmp_path, received, monkeypatch, capfd):
    monkeypatch.setattr(journal.Journal.__init__, "__defaults__", (tmp_path / "socket",))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sailor-agent", "run"])
    with capfd.disabled():
        of_stderr = os.fstat(sys.stderr.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{of_stderr.st_dev}:{of_stderr.st_ino}")
        try:
            begin_log("json", lambda: {"job": "tale", "generation": 3, "step": None})
            structlog.get_logger("sailor-agent").warning("lease expired", node="n1")
        finally:
            monkeypatch.delenv("JOURNAL_STREAM")
            begin_log("terminal")
    told = parts(received.recv(1 << 16))
    assert '"event": "lease expired"' in told.pop("MESSAGE")
    assert told == {
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "sailor-agent",
        "SAILOR_JOB": "tale",
        "SAILOR_GENERATION": "3",
        "SAILOR_NODE": "n1",
    }


def test_lines_of_several_lines_arrive_whole(tmp_path, received):
    Journal(tmp_path / "socket").msg("a\nb", level="error", fields={})
    told = parts(received.recv(1 << 16))
    assert (told["MESSAGE"], told["PRIORITY"]) == ("a\nb", "3")


def test_half_of_a_surrogate_in_a_name_does_not_end_the_service(tmp_path, received):
    """A reason on a command line may have any bytes."""
    Journal(tmp_path / "socket").msg("paused: \udcff", level="info", fields={"job": "\ud800"})
    told = parts(received.recv(1 << 16))
    assert (told["MESSAGE"], told["SAILOR_JOB"]) == ("paused: ?", "?")


def test_what_the_journal_does_not_take_goes_to_standard_error(tmp_path, capfd):
    Journal(tmp_path / "nobody").msg("gone", level="critical", fields={})
    assert capfd.readouterr().err == "<2>gone\n"


def test_another_stream_is_no_journal(monkeypatch):
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    assert not is_journal(2)
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not is_journal(2)
