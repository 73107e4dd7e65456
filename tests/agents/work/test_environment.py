"""The environment of a job: its packages, its setup commands, its secrets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.work import environment
from agents.work.environment import READ_BYTES, SetupError, _Log, hidden_of, set_up
from agents.work.secrets import SecretsError, find_secrets, read_secrets
from agents.work.work_folder import WorkFolder, worker_view
from agents.workers.fork_client import ForkClient
from tests.agents.running import ROOT
from tests.agents.work.wheels import wheel

INSTALL = "pip install -q --no-index --no-deps ./*.whl"


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "home")


def made(home: Path) -> WorkFolder:
    folder = WorkFolder(home)
    folder.files.mkdir(parents=True)
    return folder


async def test_commands_run_in_order_in_the_folder_with_pip_and_the_nodes_packages(folder):
    wheel(folder.files, "tiny", "1.0")
    commands = (
        "echo hello > made",
        INSTALL,
        "python -c 'import tiny, numpy, simulator; print(tiny.VERSION, numpy.__version__)' >> made",
    )
    await set_up(folder, commands, {})
    assert (folder.files / "made").read_text().split() == ["hello", "1.0", version("numpy")]
    assert folder.log.read_text().splitlines() == [f"$ {command}" for command in commands]


async def test_a_failing_command_is_named_with_its_exit_code_and_last_lines(folder):
    command = "for n in 1 2 3 4; do echo line $n; done; exit 3"
    with pytest.raises(SetupError) as failed:
        await set_up(folder, ("true", command, "touch never"), {})
    assert str(failed.value) == f"setup `{command}` exited with 3: line 2 | line 3 | line 4"
    assert folder.log.read_text().endswith("line 4\nexited with 3\n")
    assert not (folder.files / "never").exists()


async def test_what_a_cancelled_setup_has_started_ends(folder):
    fifo = folder.files / "fifo"
    os.mkfifo(fifo)
    running = asyncio.create_task(set_up(folder, ("(echo > fifo; sleep 1000) & wait",), {}))
    await asyncio.to_thread(fifo.read_text)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The group is gone: nothing in it holds the end of a pipe open.


async def test_a_setup_that_is_cancelled_while_its_shell_starts_leaves_nothing(folder, monkeypatch):
    begun, start = asyncio.Event(), asyncio.create_subprocess_shell
    fifo = folder.files / "fifo"
    os.mkfifo(fifo)

    async def start_slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        begun.set()
        await asyncio.sleep(0.01)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_shell", start_slowly)
    command = "sleep 1000 & echo $! > fifo; wait"
    running = asyncio.create_task(set_up(folder, (command,), {}))
    process = os.pidfd_open(int(await asyncio.to_thread(fifo.read_text)))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert select.select([process], [], [], 30)[0], "it was killed"
    os.close(process)


async def test_a_command_of_another_user_that_is_cancelled_while_it_is_asked_for_is_ended(folder):
    loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    done: list[str] = []

    class Asked:
        async def start(self, *asked: Any) -> Asked:
            await asyncio.to_thread(self.ask, asked[-1])
            return self

        def ask(self, output: int) -> None:
            loop.call_soon_threadsafe(begun.set)
            goes_on.wait()
            os.fstat(output)  # It is passed on only now.
            done.append("started")

        async def wait(self) -> int:
            raise AssertionError

        async def kill(self) -> None:
            done.append("killed")
            raise ConnectionError("the fork server ended")

        async def end_all(self) -> None:
            raise AssertionError

    with folder.log.open("ab") as file:
        log = _Log(file, [])
        running = asyncio.create_task(environment._run("x", folder.files, {}, log, Asked()))
        await begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert done == ["started", "killed"]


async def test_secrets_are_variables_and_are_blotted_out_in_log_and_error(folder):
    with pytest.raises(SetupError) as failed:
        await set_up(folder, ('echo "with $TOKEN"; exit 1',), {"TOKEN": "s3cret"})
    assert "with ***" in str(failed.value)
    assert "s3cret" not in folder.log.read_text() + str(failed.value)


async def test_no_line_of_a_secret_is_logged_and_none_in_parts(folder):
    secret = "-----BEGIN KEY-----\nline of base64\nxy\n-----END KEY-----"
    cut = f"printf '{'.' * (READ_BYTES - 5)}%s' s3cret.end"
    commands = ('echo "$KEY"', 'echo "$KEY" | grep line', cut, "printf s3cre; exit 1")
    with pytest.raises(SetupError, match="s3cre"):
        await set_up(folder, commands, {"KEY": secret, "TOKEN": "s3cret"})
    log = folder.log.read_text()
    assert log.startswith('$ echo "$KEY"\n***\n$ echo "$KEY" | grep line\n***\n$')
    assert log.count("...***.end") == 1
    assert log.endswith("s3creexited with 1\n"), "what only begins as a secret does is shown"


@given(data=st.data())
async def test_a_secret_is_hidden_however_its_parts_are_read(data):
    secrets = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=1))
    text = data.draw(st.text("abc", max_size=30)).encode()
    file = io.BytesIO()
    log = _Log(file, hidden_of(secrets))
    while text:
        count = data.draw(st.integers(1, len(text)))
        log.write(text[:count])
        text = text[count:]
    log.write(b"", is_last=True)
    assert not any(secret.encode() in file.getvalue() for secret in secrets)


async def test_a_command_ends_although_it_leaves_a_process_running(folder, monkeypatch):
    monkeypatch.setattr(environment, "DRAIN_S", 0.01)
    fifo = folder.files / "fifo"
    os.mkfifo(fifo)
    await set_up(folder, ("(exec 3<>fifo; sleep 1000) & echo $! > left; echo done",), {})
    assert folder.log.read_text().endswith("\ndone\n")
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(int((folder.files / "left").read_text()))
        assert select.select([process], [], [], 30)[0], "it was killed"
        os.close(process)


@pytest.mark.parametrize("value", [b"\xff\xfe", b"a\0b"])
async def test_a_secret_that_is_not_text_is_named(value, tmp_path):
    (tmp_path / "BINARY").write_bytes(value)
    with pytest.raises(SecretsError, match="secret BINARY on this node is not text"):
        read_secrets(find_secrets(tmp_path, ["BINARY"]))


async def test_long_lines_and_bytes_that_are_no_text_are_taken(folder):
    await set_up(folder, ("head -c 300000 /dev/zero; printf '\\377\\n'",), {})
    assert folder.log.stat().st_size > 300_000


async def fork(tmp_path: Path, **works: dict[str, Any]) -> dict[str, Any]:
    """Fork a worker of each job from one fork server; return what they saw."""
    client = ForkClient(tmp_path, "tests.agents.work.environment_worker", 60.0)
    seen = {}
    try:
        await client.ensure_running()
        for name, work in works.items():
            home = tmp_path / name
            home.mkdir()
            await client.fork(home, {"work": work, "out": str(home / "seen")})
            while not (home / "exit").exists():
                await asyncio.sleep(0.01)
            assert (home / "exit").read_text() == "0", (home / "output").read_text()
            seen[name] = json.loads((home / "seen").read_text())
    finally:
        await client.close()
        assert client._process is not None
        await client._process.wait()
    return seen


@pytest.mark.slow
async def test_two_jobs_with_different_versions_do_not_meet(tmp_path):
    works = {}
    for number in ("1.0", "2.0"):
        folder = made(tmp_path / f"home{number}")
        wheel(folder.files, "tiny", number)
        await set_up(folder, (INSTALL,), {})
        works[f"job{number}"] = worker_view(folder, {})
    seen = await fork(tmp_path, **works)
    assert {name: each["tiny"] for name, each in seen.items()} == {"job1.0": "1.0", "job2.0": "2.0"}
    assert seen["job2.0"]["cwd"] == works["job2.0"]["folder"]


async def test_a_worker_of_a_newer_version_takes_no_package_of_the_older_one(
    tmp_path, folder, monkeypatch
):
    """An upgrade leaves environments as they are; each version has its own packages."""
    older, newer = tmp_path / "older", tmp_path / "newer"
    for place in (older, newer):
        place.mkdir()
        (place / "of_the_node.py").write_text(f"PLACE = {place.name!r}\n")
    below = [*environment.site.getsitepackages(), str(older)]
    monkeypatch.setattr(environment.site, "getsitepackages", lambda: below)
    say = "import of_the_node; print(of_the_node.PLACE)"
    await set_up(folder, (f"python -c '{say}' > said",), {})
    assert (folder.files / "said").read_text() == "older\n"
    enters = "import json, sys; from worker.control.work_folder import enter_job; "
    command = [sys.executable, "-c", f"{enters}enter_job(json.loads(sys.argv[1])); {say}"]
    done = subprocess.run(
        [*command, json.dumps(worker_view(folder, {}))],
        env={**os.environ, "PYTHONPATH": f"{newer}:{ROOT}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "newer\n"


@pytest.mark.slow
async def test_another_version_of_what_workers_have_loaded_is_refused(tmp_path, folder):
    wheel(folder.files, "numpy", "1.0")
    wheel(folder.files, "tiny", "1.0")
    await set_up(folder, (INSTALL,), {})
    seen = (await fork(tmp_path, job=worker_view(folder, {})))["job"]
    wanted = f"[work] setup: installed numpy 1.0, but workers run with {version('numpy')}"
    assert [problem.partition(";")[0] for problem in seen["problems"]] == [wanted]


async def test_a_secret_reaches_the_worker_from_its_file(tmp_path, folder):
    wheel(folder.files, "tiny", "1.0")
    await set_up(folder, (INSTALL,), {})
    (tmp_path / "A_SECRET").write_text("a first line\nthe end\n")
    found = find_secrets(tmp_path, ["A_SECRET"])
    view = worker_view(folder, found)
    assert "first line" not in json.dumps(view)
    seen = (await fork(tmp_path, job=view))["job"]
    assert seen["secret"] == "a first line\nthe end"
    assert seen["shown"] == "*** and *** of it", "neither the whole nor a line of it"


async def test_secrets_come_from_files_then_the_environment_and_missing_ones_are_named(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HERE", "1")
    monkeypatch.setenv("BOTH", "of the environment")
    (tmp_path / "BOTH").write_text("of the file\r\n")
    found = find_secrets(tmp_path, ["HERE", "BOTH"])
    assert read_secrets(found) == {"HERE": "1", "BOTH": "of the file"}
    with pytest.raises(SecretsError, match=r"missing on this node: NOT_A, NOT_B; give them as"):
        find_secrets(tmp_path, ["NOT_A", "HERE", "NOT_B"])
    with pytest.raises(SecretsError, match=r"NOT_A; give them in the agent's environment"):
        find_secrets(None, ["NOT_A"])
