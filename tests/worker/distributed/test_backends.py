"""What is set for NCCL before it makes its first group."""

from __future__ import annotations

import os
import socket

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from worker.distributed.backends import (
    NCCL_DEFAULTS,
    NCCL_SETTINGS,
    OLD_RECORDER,
    interface_of,
    prepare_environment,
)

pytestmark = pytest.mark.torch


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
