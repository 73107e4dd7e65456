"""The files of the page: nothing from elsewhere, nothing inline, and cached by their content."""

from __future__ import annotations

import gzip
import http.client
import re
from collections.abc import Iterator

import pytest

from sailord.page.files import page_files
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

NAMESPACE = "http://www.w3.org/2000/svg"


def texts() -> dict[str, str]:
    return {name: each.body.decode() for name, each in page_files().items()}


def test_no_file_names_another_servers_address() -> None:
    for name, text in texts().items():
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]", text.replace(NAMESPACE, "")), (
            name
        )
        assert "@import" not in text, name


def test_nothing_is_inline_and_no_text_becomes_html() -> None:
    page = texts()["index.html"]
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! type=\"module\" src=)", page)
    for name, text in texts().items():
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(",
                                 text), name  # fmt: skip


def test_every_element_that_the_scripts_look_for_exists() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', texts()["index.html"]))
    asked = {
        found for text in texts().values() for found in re.findall(r'byId\("([\w-]+)"\)', text)
    }
    assert len(asked) > 30
    assert asked <= ids


def test_the_whole_page_is_small() -> None:
    assert sum(len(each.zipped) for each in page_files().values()) < 30_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("files"))
    try:
        found.start()
        wait_until(lambda: found.ask("GET", "/livez")[0] == 200)
        yield found
    finally:
        found.stop_all()


def get(place: Place, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    wire = http.client.HTTPConnection("127.0.0.1", place.port, timeout=10)
    wire.request("GET", path, headers=headers)
    reply = wire.getresponse()
    body = reply.read()
    wire.close()
    return reply, body


def test_the_page_is_served_without_a_token_under_a_strict_policy(place: Place) -> None:
    reply, body = get(place, "/", **{"Accept-Encoding": "gzip"})
    assert reply.status == 200
    assert b"<title>Sailor</title>" in gzip.decompress(body)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    tag = reply.headers["ETag"]
    assert get(place, "/", **{"If-None-Match": tag})[0].status == 304
    assert get(place, "/page/app.js")[0].headers["Content-Type"].startswith("text/javascript")


@pytest.mark.slow
def test_unknown_files_and_data_without_a_token_are_refused(place: Place) -> None:
    assert get(place, "/page/other.js")[0].status == 404
    assert get(place, "/page/..%2ffiles.py")[0].status == 404
    assert get(place, "/v1/live")[0].status == 401
    assert get(place, "/v1/goodput")[0].status == 401
