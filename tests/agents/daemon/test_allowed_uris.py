"""Prefixes of URIs: which scheme, folder and address they admit, and which never."""

from __future__ import annotations

import pytest

from agents.daemon.allowed_uris import CHECKPOINTS, MOUNTS, check_prefix, check_uri, is_public
from simulator.documents.problems import InputError


@pytest.mark.parametrize("prefix", ["http://x", "gs", "file://etc", "", "FILE:///x", "https://"])
def test_an_operator_cannot_allow_hosts_for_checkpoints(prefix):
    assert check_prefix(prefix, CHECKPOINTS)


@pytest.mark.parametrize(
    "prefix", ["http://x/", "ftp://x", "gs", "https://$(id)/", "gs://`id`", 's3://"', "gs://\\"]
)
def test_an_operator_cannot_allow_plain_http_or_texts_for_a_shell(prefix):
    assert check_prefix(prefix, MOUNTS)


@pytest.mark.parametrize("prefix", [*MOUNTS.default, "https://data.corp/", "file:///srv", "*"])
def test_prefixes_of_data_name_buckets_folders_and_hosts(prefix):
    assert not check_prefix(prefix, MOUNTS)


@pytest.mark.parametrize(
    ("uri", "allowed", "passes"),
    [
        ("gs://b/x", CHECKPOINTS.default, True),
        ("s3://b", CHECKPOINTS.default, True),
        ("file:///tmp/x", CHECKPOINTS.default, False),
        ("gs://b/x", ("gs://b/",), True),
        ("gs://bb/x", ("gs://b",), False),
        ("gs://b/../c", ("gs://b",), False),
        ("gs://b", ("gs://b/",), True),
        ("http://h/x", ("*",), True),
    ],
)
def test_prefixes_end_at_slashes(uri, allowed, passes):
    if passes:
        check_uri(uri, allowed, CHECKPOINTS, "checkpoint: uri")
    else:
        with pytest.raises(InputError, match="not where jobs may have checkpoints"):
            check_uri(uri, allowed, CHECKPOINTS, "checkpoint: uri")


@pytest.mark.parametrize(
    ("uri", "allowed", "passes"),
    [
        ("https://example.org/x", MOUNTS.default, True),
        ("https://8.8.8.8/x", MOUNTS.default, True),
        ("https://10.0.0.1/x", MOUNTS.default, False),
        ("https://10.0.0.1/x", ("https://", "https://10.0.0.1/"), True),
        ("https://10.0.0.12/x", ("https://", "https://10.0.0.1"), False),
        ("https://u@169.254.169.254/x", MOUNTS.default, False),
        ("https://[::1]/x", MOUNTS.default, False),
        ("http://example.org/x", MOUNTS.default, False),
        ("hf://datasets/x", MOUNTS.default, True),
        ("gs://b/x", ("https://",), False),
    ],
)
def test_data_of_the_web_is_public_unless_the_operator_names_its_host(uri, allowed, passes):
    if passes:
        check_uri(uri, allowed, MOUNTS, "data.mounts: x")
    else:
        with pytest.raises(InputError, match=r"data.mounts: x: .* not where jobs may have data"):
            check_uri(uri, allowed, MOUNTS, "data.mounts: x")


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("64:ff9b::808:808", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("a name", False),
    ],
)
def test_addresses_of_the_private_network_are_not_public(address, holds):
    assert is_public(address) == holds
