"""Log lines on standard error."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
import structlog

from agents.daemon.logs import begin_log


class OnFullDisk(io.StringIO):
    """A log on a disk that is full for a while."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int:
        return 2


@pytest.fixture
def log_file(monkeypatch):
    file = OnFullDisk()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.delenv("JOURNAL_STREAM", raising=False)
        begin_log("json")
        yield file
    begin_log("terminal")


def test_a_full_disk_under_the_log_does_not_end_the_service(log_file):
    """Outside of systemd it is often the disk of the state folder."""
    log = structlog.get_logger("sailord")
    log.error("the node's state cannot be saved")
    log_file.is_full = False
    log.warning("there is room again")
    assert "there is room again" in log_file.getvalue()
