"""What is set for NCCL before it makes its first group, and waits that gloo would never end."""

from __future__ import annotations

import os
import socket

import pytest

from worker.distributed.backends import (
    NCCL_DEFAULTS,
    NCCL_SETTINGS,
    OLD_RECORDER,
    GlooBackends,
    interface_of,
    prepare_environment,
)
from worker.distributed.operations import StartedOperation


class Sum:
    """A collective of gloo, which ends after some looks, with an error or not; or never."""

    def __init__(self, looks: float, *, error: str = "") -> None:
        self.left, self.error = looks, error

    def wait(self, limit=None):
        assert limit or self.is_completed(), "a look takes a moment"
        self.left -= 1
        if self.left >= 0 or self.error:
            raise RuntimeError(self.error if self.left < 0 else "Operation timed out!")

    def is_completed(self):
        return self.left < 0


def waited(work, *, has_failed=lambda: False):
    operation = StartedOperation("all", 1, "a sum", 0.0, work=work)
    return GlooBackends("127.0.0.1", 60.0).wait(operation, has_failed)


def test_a_slow_collective_is_awaited_as_long_as_no_rank_is_lost():
    assert waited(Sum(20))
    with pytest.raises(RuntimeError, match="Connection closed"):
        waited(Sum(3, error="Connection closed by peer"))


class EndsAfterTheLook(Sum):
    """Ends between the end of a look and the question whether it has ended."""

    def is_completed(self):
        self.left = -1
        return True


def test_a_collective_that_ends_just_after_a_look_has_not_failed():
    assert waited(EndsAfterTheLook(1))


def test_a_collective_that_goes_on_after_a_loss_is_left():
    """Seen with torch 2.13: a send that begins as the connection closes waits for its timeout."""
    asked = []
    assert not waited(Sum(float("inf")), has_failed=lambda: asked.append(1) or len(asked) > 3)
    # An abort has a moment to end it.
    assert waited(Sum(1), has_failed=lambda: True)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (*NCCL_SETTINGS, *NCCL_DEFAULTS, OLD_RECORDER, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def test_nccl_uses_the_interface_of_the_ranks_address():
    prepare_environment("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


def test_interface_that_is_set_already_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    prepare_environment("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("name", [OLD_RECORDER, "TORCH_FR_BUFFER_SIZE"])
def test_recorder_that_is_switched_on_stays_on(monkeypatch, name):
    monkeypatch.setenv(name, "20000")
    prepare_environment()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "20000"


@pytest.mark.parametrize("host", ["", "192.0.2.7", "no such host.invalid"])
def test_without_an_interface_nccl_chooses(host):
    prepare_environment(host)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_interface_of_a_name_and_of_an_ipv6_address_is_found():
    assert interface_of("localhost") == "lo"
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            has_loopback = any(line.split()[-1] == "lo" for line in lines)
        assert (interface_of("::1") == "lo") is has_loopback
