"""One real sailord for all tests of the API, with every webhook open."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from tests.local_http import LocalServer, QuietHandler
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

SECRET = "a-webhook-secret-of-ours"
ALERT_TOKEN = "an-alertmanager-token"


class Receiver(LocalServer):
    """Takes webhooks; refuses the first, to see that it comes again."""

    def __init__(self) -> None:
        super().__init__(_Take)
        self.taken: list[tuple[str, bytes]] = []
        self.refused: list[bytes] = []


class _Take(QuietHandler):
    def reply(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.refused:
            self.server.refused.append(body)
            self.send_response(500)
        else:
            self.server.taken.append((self.headers["Sailor-Webhook"], body))
            self.send_response(204)
        self.end_headers()


@pytest.fixture(scope="module")
def receiver():
    server = Receiver()
    yield server
    server.close()


@pytest.fixture(scope="module")
def pubsub_key():
    return generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def head(tmp_path_factory, receiver, pubsub_key):
    """A sailord that leads, with one fake agent."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "secret").write_text(SECRET)
    (folder / "alert").write_text(ALERT_TOKEN)
    for name in ("secret", "alert"):
        (folder / name).chmod(0o600)
    n = pubsub_key.public_key().public_numbers().n
    text = base64.urlsafe_b64encode(n.to_bytes(256, "big")).rstrip(b"=").decode()
    key = {"kty": "RSA", "kid": "1", "e": "AQAB", "n": text}
    (folder / "jwks").write_text(json.dumps({"keys": [key]}))
    webhooks = (
        '\n[webhooks]\nsecret_file = "secret"\nalertmanager_token_file = "alert"\n'
        '[webhooks.pubsub]\naudience = "us"\nemail = "push@p"\nkeys = "jwks"\n'
        f'[[webhooks.receiver]]\nurl = "http://127.0.0.1:{receiver.server_port}/in"\n'
        'secret_file = "secret"\n'
    )
    place = Place(folder, webhooks=webhooks)
    try:
        place.start()
        wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
        place.start_agent("a")
        wait_until(lambda: place.status()["nodes"].get("ready"))
        yield place
    finally:
        place.stop_all()
