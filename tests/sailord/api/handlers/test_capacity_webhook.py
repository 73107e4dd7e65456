"""Capacity messages, in three forms, are noted in the event feed once, also after a restart."""

from __future__ import annotations

import base64
import json

import pytest

from agents.protocol.store_keys import Keys
from agents.store.interface import StoreUnavailable, WriteUnknown
from agents.store.sqlite_store import EmbeddedStore
from sailord.api.handlers import capacity_webhook as module
from sailord.api.handlers.capacity_webhook import (
    AvailableGpus,
    note_new,
    store_message,
    stored_messages,
)
from sailord.cluster_records import Gateway
from tests.sailord.api.conftest import ALERT_TOKEN
from tests.sailord.api.test_api import assert_refused, post_plain
from tests.sailord.api.test_preemption_push import post, token

PATH = "/v1/webhooks/capacity"


def told(head) -> list[str]:
    happened = head.ask("GET", "/v1/events?follow=false")[1]["events"]
    return [each["text"] for each in happened if "available" in each["text"]]


def pushed(id_: str, said: object) -> bytes:
    data = base64.b64encode(json.dumps(said).encode()).decode()
    return json.dumps({"message": {"data": data, "messageId": id_}}).encode()


@pytest.mark.slow
def test_message_is_noted_once_by_its_id(head):
    news = {"id": "c1", "zone": "z1", "gpu": "A100-40", "gpus": 8}
    assert post_plain(head, news, path="capacity") == (202, {"accepted": 1, "new": 1})
    assert told(head)[-1] == "8 A100-40 available in z1"
    before = told(head)
    again = [news, news | {"gpus": 4}]
    for each in again:
        assert post_plain(head, each, path="capacity") == (202, {"accepted": 1, "new": 0})
    assert told(head) == before
    assert_refused(post_plain(head, news | {"zone": "z2"}, path="capacity"), 409)
    assert post_plain(head, news | {"id": "c2"}, path="capacity")[1]["new"] == 1
    assert told(head) == [*before, before[-1]], "another id is another message, whatever it says"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"id": "/"}, {"zone": "a b"}, {"gpu": ""}, {"gpus": -1}, {"gpus": 10**7}, {"gpus": "8"}],
)
def test_invalid_message_is_refused(head, changed):
    news = {"id": "bad", "zone": "z1", "gpu": "A100-40", "gpus": 8} | changed
    assert_refused(post_plain(head, news, path="capacity"), 422)


@pytest.mark.slow
def test_message_arrives_by_pubsub(head, pubsub_key):
    bearer = {"Authorization": f"Bearer {token(pubsub_key)}"}
    body = pushed("p1", {"zone": "z3", "gpu": "V100-16", "gpus": 2})
    assert post(head, PATH, body, bearer) == (202, {"accepted": 1, "new": 1})
    assert post(head, PATH, body, bearer) == (202, {"accepted": 1, "new": 0})
    assert told(head)[-1] == "2 V100-16 available in z3"
    for said in ([], 3, {}, {"zone": "z3", "gpu": "V100-16"}):
        assert_refused(post(head, PATH, pushed("p2", said), bearer), 422)
    other = {"Authorization": f"Bearer {token(pubsub_key, aud='elsewhere')}"}
    assert_refused(post(head, PATH, body, other), 401)


@pytest.mark.slow
def test_message_arrives_from_alertmanager(head):
    def alert(status, **labels):
        labels = {"zone": "z4", "gpu": "T4-16"} | labels
        return {
            "status": status, "labels": labels, "annotations": {"gpus": "6"},
            "fingerprint": "f", "startsAt": "2030-01-01T00:00:00Z",
        }  # fmt: skip

    def send(*alerts):
        body = json.dumps({"version": "4", "alerts": alerts}).encode()
        return post(head, PATH, body, {"Authorization": f"Bearer {ALERT_TOKEN}"})

    assert send(alert("firing"), alert("firing"))[1] == {"accepted": 1, "new": 1}
    assert told(head)[-1] == "6 T4-16 available in z4"
    assert send(alert("firing"))[1]["new"] == 0
    assert send(alert("resolved"))[1]["new"] == 1
    assert told(head)[-1] == "0 T4-16 available in z4"
    wrong = [3, alert("odd"), alert("firing", gpus="many"), alert("firing", zone=3), {"labels": {}}]
    for each in wrong:
        assert_refused(send(each), 422)


async def told_of(gateway: Gateway, news: AvailableGpus) -> str:
    return await store_message(gateway, news, await stored_messages(gateway))


async def test_message_ids_survive_a_restart_and_the_oldest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    store = await EmbeddedStore.open(tmp_path / "store")
    first = AvailableGpus("plain:n0", "z", "g", 1)
    assert await told_of(Gateway(store, Keys("test")), first) == "new"
    await store.close()
    store = await EmbeddedStore.open(tmp_path / "store")
    gateway = Gateway(store, Keys("test"))
    assert await told_of(gateway, first) == "known"
    for number in range(1, 4):
        assert await told_of(gateway, AvailableGpus(f"plain:n{number}", "z", "g", 1)) == "new"
    assert len((await store.snapshot(gateway.keys.news)).entries) == 3
    assert await told_of(gateway, AvailableGpus("plain:n3", "z", "g", 9)) == "known"
    assert await told_of(gateway, AvailableGpus("plain:n3", "y", "g", 1)) == "other"
    assert await told_of(gateway, first) == "new", "the oldest was deleted"
    await store.close()


class Halting:
    """A store that loses the answer to a write, or fails after some writes."""

    def __init__(self, store: EmbeddedStore, writes: int, *, is_mute: bool) -> None:
        self.store, self.writes, self.is_mute = store, writes, is_mute
        self.snapshot, self.get = store.snapshot, store.get

    async def transact(self, *said):
        self.writes -= 1
        if self.writes < 0 and self.is_mute:
            await self.store.transact(*said)
            raise WriteUnknown("by the test")
        if self.writes < 0:
            raise StoreUnavailable("by the test")
        return await self.store.transact(*said)


async def test_every_stored_message_was_noted_though_the_store_fails_midway(tmp_path):
    store = await EmbeddedStore.open(tmp_path / "store")
    news = [AvailableGpus(f"plain:n{number}", "z", "g", 1) for number in range(3)]
    said: list[str] = []
    halting = Gateway(Halting(store, 1, is_mute=False), Keys("test"))
    with pytest.raises(StoreUnavailable):
        await note_new(halting, news, lambda each: said.append(each.id))
    gateway = Gateway(Halting(store, 0, is_mute=True), Keys("test"))
    assert await note_new(gateway, news, lambda each: said.append(each.id)) == [
        *("known", "new", "new")
    ]
    assert said == [each.id for each in news]
    await store.close()
