"""The environment of a job: its packages, its setup commands, its secrets."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from agents.work.environment import SetupError, set_up
from agents.work.secrets import SecretsError, find_secrets, read_secrets
from agents.work.work_folder import WorkFolder, worker_view
from agents.workers.fork_client import ForkClient
from tests.agents.work.wheels import wheel

pytestmark = pytest.mark.asyncio
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


async def test_secrets_are_variables_and_are_blotted_out_in_log_and_error(folder):
    with pytest.raises(SetupError) as failed:
        await set_up(folder, ('echo "with $TOKEN"; exit 1',), {"TOKEN": "s3cret"})
    assert "with ***" in str(failed.value)
    assert "s3cret" not in folder.log.read_text() + str(failed.value)


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
    (tmp_path / "A_SECRET").write_text("value\n")
    found = find_secrets(tmp_path, ["A_SECRET"])
    view = worker_view(folder, found)
    assert "value" not in json.dumps(view)
    assert (await fork(tmp_path, job=view))["job"]["secret"] == "value"


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
