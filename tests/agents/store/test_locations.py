"""Addresses of the store, and the mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.store.factory import open_store
from agents.store.locations import Etcd, OnDisk, check_address, read_address
from simulator.documents.problems import InputError, Problems


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


@pytest.mark.parametrize("name", ["password_file", "key"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_secret_that_others_may_read_is_refused(tmp_path, name, mode):
    for each in ("password_file", "key", "cert", "ca"):
        (tmp_path / each).write_text("x")
        (tmp_path / each).chmod(mode if each == name else 0o600)
    (tmp_path / "ca").chmod(0o644)  # It is no secret.
    files = "&".join(f"{each}={tmp_path}/{each}" for each in ("ca", "cert", "key"))
    problems = Problems()
    check_address(f"etcd://h?user=a&password_file={tmp_path}/password_file&{files}", problems, "s")
    told = (
        f"s: its {name}, {tmp_path}/{name}: is a secret, and its mode 0{mode:o} lets others use it"
    )
    cure = f"; chmod 600 {tmp_path}/{name}"
    assert [str(each) for each in problems.found] == ([] if mode == 0o600 else [told + cure])


async def test_a_key_that_others_may_read_opens_no_store(tmp_path):
    for each in ("key", "cert", "ca"):
        (tmp_path / each).write_text("x")
        (tmp_path / each).chmod(0o644)
    files = "&".join(f"{each}={tmp_path}/{each}" for each in ("ca", "cert", "key"))
    with pytest.raises(InputError, match=r"the store's key, .*: is a secret, and its mode 0644"):
        await open_store(f"etcd://h?{files}")
