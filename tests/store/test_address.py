"""The line that says where the store is: what is wrong with it is told all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.store.address import OnDisk, read_address
from simulator.errors import InputError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (
            "embedded:///var/lib/sailor/store.db",
            OnDisk("embedded", Path("/var/lib/sailor/store.db")),
        ),
        ("unix:///run/sailor.sock", OnDisk("unix", Path("/run/sailor.sock"))),
        ("unix:/run/sailor.sock?timeout_s=1.5", OnDisk("unix", Path("/run/sailor.sock"), 1.5)),
    ],
)
def test_an_address_is_read(url, address):
    assert read_address(url) == address


@pytest.mark.parametrize(
    ("url", "problems"),
    [
        ("", ["names no kind of store"]),
        ("/var/lib/sailor", ["names no kind of store"]),
        ("zookeeper://a:1", ["names no kind of store"]),
        ("embedded://store.db", ['has a host, "store.db"; a path begins with a third slash']),
        ("embedded:store.db", ["names no file by its whole path"]),
        ("embedded:///folder/", ["names no file by its whole path"]),
        ("embedded:///a?timeout_s=1", ["has an option timeout_s, which"]),
        ("unix:///a?timeout_s=0&x=1", ['timeout_s is "0"', "has an option x, which"]),
        ("unix:///a?timeout_s=nan", ['timeout_s is "nan"']),
        ("unix:///a?timeout_s=soon", ['timeout_s is "soon"; give seconds above 0, up to 600']),
        ("unix:///a?soon", ["cannot be read"]),
        ("unix://[::1/a", ["cannot be read"]),
    ],
)
def test_what_is_wrong_is_told_at_once(url, problems):
    with pytest.raises(InputError) as caught:
        read_address(url)
    found = caught.value.problems
    assert len(found) == len(problems)
    for problem, part in zip(found, problems, strict=True):
        assert part in str(problem)
        assert problem.place == f'the store\'s address "{url}"'
