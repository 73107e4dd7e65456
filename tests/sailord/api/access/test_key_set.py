"""Keys of webhook tokens are renewed when they change, and not as often as a stranger likes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from sailord.api.access.key_set import AGAIN_S, BYTES_MAX, KEEP_S, REFRESH_S, KeySet
from sailord.providers.gce.config import GOOGLE_KEYS
from simulator.documents.problems import InputError
from tests.sailord.providers.test_config import read

NUMBER = generate_private_key(65537, 2048).public_key().public_numbers().n
TEXT = base64.urlsafe_b64encode(NUMBER.to_bytes(256, "big")).rstrip(b"=").decode()


def document(*ids: str) -> str:
    """A key set; which key it is does not matter here."""
    return json.dumps({"keys": [{"kty": "RSA", "kid": i, "e": "AQAB", "n": TEXT} for i in ids]})


class Issuer:
    """An issuer's address, and a clock."""

    def __init__(self) -> None:
        self.body, self.status, self.asked, self.now = document("1"), 200, 0, 1000.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        await self.gate.wait()
        headers = {"Location": "/elsewhere"} if self.status == 302 else {}
        return web.Response(text=self.body, status=self.status, headers=headers)


def play(story: Callable[[Issuer, KeySet], Awaitable[None]]) -> None:
    async def run() -> None:
        issuer = Issuer()
        app = web.Application()
        app.router.add_get("/{any:.*}", issuer.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/certs"
        try:
            await story(issuer, KeySet(address, lambda: issuer.now))
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_a_new_key_is_fetched_when_a_token_names_it():
    async def story(issuer: Issuer, keys: KeySet) -> None:
        assert set(await keys.find("1")) == {"1"}
        assert set(await keys.find("1")) == {"1"}
        assert issuer.asked == 1
        issuer.body = document("2", "3")
        issuer.now += AGAIN_S
        assert set(await keys.find("2")) == {"2", "3"}, "and the old one is no longer accepted"
        assert issuer.asked == 2

    play(story)


def test_unknown_keys_cause_one_request_a_minute():
    async def story(issuer: Issuer, keys: KeySet) -> None:
        await keys.find("1")
        for number in range(100):
            assert set(await keys.find(f"stranger-{number}")) == {"1"}
        assert issuer.asked == 1
        issuer.now += AGAIN_S
        await asyncio.gather(*(keys.find(f"stranger-{number}") for number in range(100)))
        assert issuer.asked == 2

    play(story)


def test_tokens_with_a_new_key_wait_for_one_answer():
    async def story(issuer: Issuer, keys: KeySet) -> None:
        issuer.gate.clear()
        first, second, third = (asyncio.create_task(keys.find("1")) for _ in range(3))
        while not issuer.asked:
            await asyncio.sleep(0)
        first.cancel()
        issuer.gate.set()
        assert set(await second) == set(await third) == {"1"}
        assert issuer.asked == 1

    play(story)


def test_keys_are_renewed_after_an_hour_without_a_wait():
    async def story(issuer: Issuer, keys: KeySet) -> None:
        await keys.find("1")
        issuer.now += REFRESH_S
        issuer.gate.clear()
        issuer.body = document("1", "2")
        assert set(await keys.find("1")) == {"1"}
        issuer.gate.set()
        await keys._fetching
        assert set(await keys.find("1")) == {"1", "2"}
        assert issuer.asked == 2

    play(story)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, ""),
        (302, ""),
        (200, "no JSON"),
        (200, document("9") + " " * BYTES_MAX),
        (200, "[" * 9999),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_known_keys_outlive_a_bad_answer_for_a_day(status, body):
    async def story(issuer: Issuer, keys: KeySet) -> None:
        await keys.find("1")
        issuer.status, issuer.body = status, body
        issuer.now += KEEP_S - AGAIN_S
        assert set(await keys.find("2")) == {"1"}
        assert issuer.asked == 2
        issuer.now += AGAIN_S
        assert await keys.find("1") == {}, "its owner may have revoked it"
        issuer.status, issuer.body = 200, document("1")
        issuer.now += AGAIN_S
        assert set(await keys.find("1")) == {"1"}

    play(story)


def test_a_file_is_read_each_time(tmp_path: Path):
    path = tmp_path / "jwks"
    keys = KeySet(path)
    for ids in (("1",), ("2", "3")):
        path.write_text(document(*ids))
        assert set(asyncio.run(keys.find("x"))) == set(ids)


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("", GOOGLE_KEYS),
        ('keys = "jwks"', Path("jwks")),
        ('keys = "https://certs.example/v3"', "https://certs.example/v3"),
        ('keys = "http://certs.example/v3"', "an attacker who can change the answer could sign"),
    ],
)
def test_keys_come_from_google_a_file_or_an_https_address(tmp_path: Path, line, source):
    pubsub = f'[webhooks.pubsub]\naudience = "us"\nemail = "push@p"\n{line}\n'
    if "http://" in line:
        with pytest.raises(InputError, match=source):
            read(tmp_path, pubsub)
    else:
        found = read(tmp_path, pubsub).webhooks.pubsub_keys
        assert found == (tmp_path / source if isinstance(source, Path) else source)
