"""An agent's certificate outlives a full disk, and a crash in the middle of its renewal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.rpc import enrolment as module
from agents.rpc.certificates import key_pem, new_key, proof_audience
from agents.rpc.client import CallFailed
from agents.rpc.enrolment import Enrolment, keep_copies
from agents.rpc.identity import Identity
from agents.rpc.tls import Tls, TlsFiles
from agents.rpc.tls_settings import TlsSettings
from sailord.authority import REVOKED, Authority, SigningRequest
from simulator.documents.problems import InputError
from worker.atomic_file import OWNER_ONLY, replace_file

NODE = Identity("test", "agent", "n1")
CERTIFICATE = "certificate.pem"
REAL_ASK = Enrolment._ask


class Crash(BaseException):
    """The machine dies."""


class Agent:
    """A node that enrols at an authority, as often as its agent starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.authority = Authority.create(folder / "ca", "test")
        own = folder / "own"
        self.files = TlsFiles(
            folder / "ca" / "ca.pem", own / CERTIFICATE, own / "key.pem", own / REVOKED
        )
        self.refused: list[str] = []
        self.shown: list[SigningRequest] = []
        self.writes: Callable[[Path], None] = lambda _: None
        """Called before a file is replaced."""
        self.wrote: Callable[[Path], None] = lambda _: None
        self.asked = asyncio.Event()
        self.loses = 0
        """How many answers are lost."""
        real = module.replace_file

        def replace_file(path: Path, content: Any, **others: Any) -> None:
            self.writes(path)
            real(path, content, **others)
            self.wrote(path)

        async def ask(_: Enrolment, tls: Tls, method: str, body: bytes) -> dict[str, str]:
            signed = b""
            try:
                if method == "POST":
                    self.shown.append(SigningRequest.read(body))
                    signed = self.authority.enrol(body, tls.own)
            except InputError as error:
                self.refused.append(str(error))
                self.asked.set()
                raise CallFailed(str(error)) from None
            if self.loses > 0:
                self.loses -= 1
                raise CallFailed("no answer in time")
            return {
                "certificate": signed.decode(),
                "revoked": (folder / "ca" / REVOKED).read_text(),
            }

        monkeypatch.setattr(module, "replace_file", replace_file)
        monkeypatch.setattr(Enrolment, "_ask", ask)
        for name in ("RETRY_S", "LOOK_S", "COPY_S"):
            monkeypatch.setattr(module, name, 0.001)

    def started(self) -> Enrolment:
        any_: Any = None
        return Enrolment(TlsSettings(self.files, enrol="sailord:1"), NODE, any_, any_)

    @property
    def opens(self) -> bool:
        """Whether an agent that starts now can use its files."""
        with contextlib.suppress(InputError):
            return Tls(self.files, "test", "agent").own == NODE
        return False


@pytest.fixture
def agent(tmp_path, monkeypatch):
    return Agent(tmp_path, monkeypatch)


async def test_an_instance_proves_itself_with_the_key_that_is_signed_and_only_once(agent):
    asked: list[str] = []

    async def prove(audience: str) -> str:
        asked.append(audience)
        return f"proof-{len(asked)}"

    enrolment = agent.started()
    enrolment.prove = prove
    tls = await enrolment.first()
    await enrolment._enrol(tls)
    first, renewed = agent.shown
    assert (first.proof, renewed.proof) == ("proof-1", ""), "later it has a certificate"
    assert asked == [first.audience] == [proof_audience(NODE, first.public)]
    assert renewed.audience != first.audience


async def test_a_machine_without_a_cloud_enrols_without_a_proof(agent):
    async def prove(_: str) -> None:
        return None

    enrolment = agent.started()
    enrolment.prove = prove
    await enrolment.first()
    assert [each.proof for each in agent.shown] == [""]


class FullDisk:
    """Refuses some writes of a file, and notes whether the agent could start meanwhile."""

    def __init__(self, agent: Agent, name: str, times: int) -> None:
        self.agent, self.name, self.left = agent, name, times
        self.opened: list[bool] = []
        self.is_free = asyncio.Event()

    def __call__(self, path: Path) -> None:
        if path.name == self.name:
            self.opened.append(self.agent.opens)
            if self.left == 0:
                self.is_free.set()
                return
            self.left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def until(event: asyncio.Event, task: asyncio.Task[Any]) -> None:
    """Wait for an event that the task causes, or for the task's end."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def test_a_full_disk_does_not_end_the_renewal_nor_part_key_and_certificate(
    agent, monkeypatch
):
    enrolment = agent.started()
    tls = await enrolment.first()
    before = agent.files.certificate.read_bytes()
    monkeypatch.setattr(
        module, "share_of_life_left", lambda path: 0.1 if path.read_bytes() == before else 1.0
    )
    agent.writes = disk = FullDisk(agent, CERTIFICATE, 3)
    keeping = asyncio.create_task(enrolment.keep(tls))
    await until(disk.is_free, keeping)
    assert not keeping.done()
    keeping.cancel()
    assert disk.opened == [True] * 4
    assert agent.opens
    assert agent.files.certificate.read_bytes() != before
    assert len(agent.authority.issued()) == 2, "what was signed is written once there is room"


async def test_a_full_disk_does_not_cost_the_list_of_revoked_certificates(agent):
    enrolment = agent.started()
    tls = await enrolment.first()
    agent.authority.issue("agent", "n2", agent.files.key.parent / "n2")
    agent.authority.revoke("agent/n2")
    agent.writes = disk = FullDisk(agent, REVOKED, 2)
    keeping = asyncio.create_task(enrolment.keep(tls))
    await until(disk.is_free, keeping)
    assert not keeping.done()
    keeping.cancel()
    assert agent.files.revoked.read_text() == (agent.files.ca.parent / REVOKED).read_text()


@pytest.mark.parametrize("name", [CERTIFICATE, REVOKED])
async def test_a_full_disk_at_the_first_enrolment_does_not_lock_the_node_out(agent, name):
    """The authority signs only once for a stranger of this name."""
    agent.writes = FullDisk(agent, name, 2)
    assert (await agent.started().first()).own == NODE
    assert agent.refused == []


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_crash_in_a_renewal_leaves_a_key_and_its_certificate(agent, is_written):
    enrolment = agent.started()
    tls = await enrolment.first()
    before = agent.files.certificate.read_bytes()

    def crash(path: Path) -> None:
        if path.name == CERTIFICATE:
            raise Crash

    agent.writes, agent.wrote = (agent.writes, crash) if is_written else (crash, agent.wrote)
    with pytest.raises(Crash):
        await enrolment._enrol(tls)
    agent.writes = agent.wrote = lambda _: None
    assert (await agent.started().first()).own == NODE
    assert (agent.files.certificate.read_bytes() != before) == is_written
    assert agent.refused == []


async def test_a_lost_answer_does_not_lock_a_new_node_out(agent):
    """Nor does a reboot in the middle: the authority signs for the same key again."""
    agent.loses = 2
    first = agent.started()
    with pytest.raises(CallFailed, match="no answer"):
        await first._enrol(first._stranger)
    starting = asyncio.create_task(agent.started().first())
    await until(agent.asked, starting)
    assert agent.refused == []
    assert (await starting).own == NODE
    assert len({each.audience for each in agent.shown}) == 1
    assert len(agent.authority.issued()) == 3


async def test_a_renamed_node_gets_a_certificate_of_its_new_name(agent):
    await agent.started().first()
    renamed = agent.started()
    renamed.owner = Identity("test", "agent", "n2")
    assert (await renamed.first()).own == renamed.owner


async def test_a_certificate_of_another_key_is_replaced_once_an_operator_lets_the_node_return(
    agent,
):
    await agent.started().first()
    replace_file(agent.files.key, key_pem(new_key()), mode=OWNER_ONLY)
    starting = asyncio.create_task(agent.started().first())
    await until(agent.asked, starting)
    assert "to let it return: sailorctl ca revoke agent/n1 --may-return" in agent.refused[0]
    agent.authority.revoke("agent/n1", may_return=True)
    assert (await starting).own == NODE


async def test_a_full_disk_does_not_end_the_copies_for_workers(agent, tmp_path):
    agent.writes = disk = FullDisk(agent, "ca.pem", 2)
    copying = asyncio.create_task(keep_copies(agent.files, tmp_path / "tls"))
    await until(disk.is_free, copying)
    assert not copying.done()
    copying.cancel()
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == agent.files.ca.read_bytes()


async def test_the_addresses_are_asked_in_turn(agent, monkeypatch):
    """The head node is lost, and its authority is on another machine by now."""
    asked: list[str] = []
    answer = {"certificate": "", "revoked": "list"}

    async def call(_: Any, address: str, *__: Any, **___: Any) -> tuple[int, bytes]:
        asked.append(address)
        if address == "down:1":
            raise CallFailed("down:1 did not answer")
        if address == "standby:1":
            problem = {"place": "tls", "what": "this sailord signs no certificates", "cure": "no"}
            return 404, json.dumps({"problems": [problem]}).encode()
        return 200, json.dumps(answer).encode()

    monkeypatch.setattr(Enrolment, "_ask", REAL_ASK)
    monkeypatch.setattr(module.SignedClient, "call", call)
    enrolment = agent.started()
    enrolment.settings = TlsSettings(agent.files, enrol="down:1, standby:1,new:1")
    assert await enrolment._ask(enrolment._stranger, "GET", b"") == answer
    assert asked == ["down:1", "standby:1", "new:1"]
    enrolment.settings = TlsSettings(agent.files, enrol="down:1,standby:1")
    with pytest.raises(CallFailed, match=r"down:1 did not answer; standby:1: tls: this sailord"):
        await enrolment._ask(enrolment._stranger, "GET", b"")
