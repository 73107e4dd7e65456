"""Addresses of the store, and the mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.store.locations import Etcd, OnDisk, read_address
from simulator.documents.problems import InputError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (
            "embedded:///var/lib/sailor/store.db",
            OnDisk("embedded", Path("/var/lib/sailor/store.db")),
        ),
        ("unix:///run/sailor.sock", OnDisk("unix", Path("/run/sailor.sock"))),
        ("unix:/run/sailor.sock?timeout_s=1.5", OnDisk("unix", Path("/run/sailor.sock"), 1.5)),
        ("etcd://a", Etcd(("a:2379",))),
        ("etcd://a:1,[::1]:2,10.0.0.1/", Etcd(("a:1", "[::1]:2", "10.0.0.1:2379"))),
        (
            "etcd://a?user=sailor&password_file=/p&ca=/c&cert=/d&key=/e&timeout_s=3",
            Etcd(("a:2379",), "sailor", Path("/p"), Path("/c"), Path("/d"), Path("/e"), 3.0),
        ),
    ],
)
def test_a_valid_address_is_read(url, address):
    assert read_address(url) == address


@pytest.mark.parametrize(
    ("url", "problems"),
    [
        ("", ["has an unknown scheme"]),
        ("/var/lib/sailor", ["has an unknown scheme"]),
        ("zookeeper://a:1", ["has an unknown scheme"]),
        ("embedded://store.db", ['has a host, "store.db"; write three slashes before the path']),
        ("embedded:store.db", ["has no absolute path of a file"]),
        ("embedded:///folder/", ["has no absolute path of a file"]),
        ("embedded:///a?timeout_s=1", ["an unknown option for this kind of store: timeout_s"]),
        ("unix:///a?timeout_s=0&x=1", ['timeout_s is "0"', "store: x"]),
        ("unix:///a?timeout_s=nan", ['timeout_s is "nan"']),
        ("unix:///a?timeout_s=soon", ['timeout_s is "soon"; give seconds above 0, up to 600']),
        ("unix:///a?soon", ["cannot be read"]),
        ("unix://[::1/a", ["cannot be read"]),
        ("etcd://", ['"" has no host']),
        ("etcd://a,,b", ['"" has no host']),
        ("etcd://a:port,b:99999", ['"a:port" is not HOST:PORT', '"b:99999" is not HOST:PORT']),
        ("etcd://a,b,a:2379", ["names a member twice"]),
        ("etcd://root:secret@a", ["contains a user; write ?user=NAME&password_file=FILE"]),
        ("etcd://a/sailor", ['has a path, "/sailor"']),
        ("etcd://a?cert=/c", ["has cert but no key; give both, or neither"]),
        ("etcd://a?key=/c", ["has key but no cert"]),
        ("etcd://a?user=x", ["has one of user and password_file"]),
        ("etcd://a?ca=pki/ca.pem", ['ca is "pki/ca.pem"; give an absolute path']),
        ("etcd://a?password=x&tls=1", ["store: password", "store: tls"]),
    ],
)
def test_all_mistakes_of_an_address_are_reported_together(url, problems):
    with pytest.raises(InputError) as caught:
        read_address(url)
    found = caught.value.problems
    assert len(found) == len(problems)
    for problem, part in zip(found, problems, strict=True):
        assert part in str(problem)
        assert problem.place == f'the store\'s address "{url.replace("root:secret", "...")}"'
