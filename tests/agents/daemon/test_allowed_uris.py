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


@pytest.mark.parametrize(
    "prefix",
    [*MOUNTS.default, "https://data.corp/", "https://data.corp", "https://[::1]:8443/a/", "*"],
)
def test_prefixes_of_data_name_buckets_and_hosts(prefix):
    assert not check_prefix(prefix, MOUNTS)


def test_a_folder_can_hold_checkpoints_and_no_data_that_an_agent_copies():
    """A link in it would have the agent copy what the job's workers may not read."""
    assert not check_prefix("file:///srv", CHECKPOINTS)
    assert check_prefix("file:///srv", MOUNTS)
    with pytest.raises(InputError, match="give the path alone, which workers read as their user"):
        check_uri("file:///srv/x", ("file:///srv",), MOUNTS, "data.mounts: x")


@pytest.mark.parametrize(
    ("prefix", "form"),
    [
        ("https://data.internal:443/", "https://data.internal/"),
        ("https://Data.internal/", "https://data.internal/"),
        ("https://data.internal/%7Eus/", "https://data.internal/~us/"),
        ("https://me:word@data.internal/", "https://data.internal/"),
        ("https://data.internal/#a", "https://data.internal/"),
    ],
)
def test_a_prefix_that_no_request_begins_with_is_refused_with_the_form_that_matches(prefix, form):
    assert check_prefix(prefix, MOUNTS) == f'would never match; write "{form}"'
    assert not check_prefix(form, MOUNTS)


@pytest.mark.parametrize("prefix", ["https:///x", "https://h:x/", "https://:80/"])
def test_a_prefix_without_a_host_is_refused(prefix):
    assert check_prefix(prefix, MOUNTS) == "names no host"


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
