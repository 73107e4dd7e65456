"""Jobs name hosts and folders that the operator did not allow; sailord touches none of them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from sailord.planning.job_spec import read_job
from simulator.documents.fields import toml_value
from simulator.models.description_file import inline_description
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB

BAD = (
    "http://127.0.0.1:{port}/x",
    "https://127.0.0.1:{port}/x",
    "ftp://127.0.0.1:{port}/x",
    "simplecache::http://127.0.0.1:{port}/x",
    "memory://x::http://127.0.0.1:{port}/x",
    "file://{folder}/../outside",
    "file://{folder}/%2e%2e/outside",
    "file://{folder}-beside",
    "file:///{folder}/link/x",
    "{folder}/link",
    "/etc/sailor",
    "file:///proc/self/environ",
    "file://localhost/etc",
    "sftp://127.0.0.1:{port}/x",
    "github://a:b@main/",
    "gs://bucket\\n",
    "reference://x",
    "zip://x::file:///etc",
)


def submit(head, uri: str) -> tuple[int, str]:
    job = f'{JOB}\n[checkpoint]\nuri = "{uri}"\n'
    code, said = head.ask("POST", "/v1/jobs", {"job": job})
    return code, str(said)


@pytest.mark.slow
def test_jobs_reach_no_host_and_no_folder_but_the_allowed(head, cost):
    outside = head.folder.parent / "outside"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        called: list[object] = []
        listening.settimeout(60)

        def listen() -> None:
            while True:
                try:
                    called.append(listening.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        (head.folder / "link").symlink_to("/etc")
        port = listening.getsockname()[1]
        answers = {uri: submit(head, uri.format(port=port, folder=head.folder)) for uri in BAD}
        listening.shutdown(socket.SHUT_RDWR)
    assert {code for code, _ in answers.values()} == {422}, answers
    assert not called
    assert not outside.exists()
    assert not os.path.exists(f"{head.folder}-beside")
    # What exists and what does not get the same words.
    words = [submit(head, path)[1].replace(path, "") for path in ("/etc/passwd", "/no/such/thing")]
    assert words[0] == words[1]
    assert submit(head, f"{head.folder}/kept")[0] == 201
    cost("6, 10 uri of a job: 18 kinds of hosts and folders", "connected; mkdir; told what exists",
         "422 each; no connection, no folder, one text for all")  # fmt: skip


@pytest.mark.slow
def test_storage_that_hangs_blocks_no_other_request(head, cost):
    """A pipe stands for a file system that never answers."""
    hanging = head.folder / "kept" / "hang" / "1-1"
    hanging.mkdir(parents=True)
    os.mkfifo(hanging / "manifest-1.json")
    codes: list[int] = []

    def ask() -> None:
        job = f'{JOB}\n[checkpoint]\nuri = "{head.folder}/kept"\n'
        codes.append(
            head.ask("POST", "/v1/jobs", {"job": job, "id": "hang", "resume": "newest"})[0]
        )

    askers = [threading.Thread(target=ask) for _ in range(48)]
    for each in askers:
        each.start()
    wait_until(lambda: len(codes) >= 16, within_s=60)
    # More than 32 may not wait; all others are answered, and so is what needs no storage.
    assert set(codes) <= {422, 502}
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "other"})[0] in (201, 502)
    assert head.status()["leads"]
    with open(hanging / "manifest-1.json", "wb", buffering=0):
        for each in askers:
            each.join(30)
    cost("7 48 submits to storage that hangs", "every submit and manifest hangs",
         "32 wait, others get 502 at once; status as ever")  # fmt: skip


BAD_DATA = (
    "http://127.0.0.1:{port}/x",
    "https://127.0.0.1:{port}/x",
    "https://u:p@127.0.0.1:{port}/x",
    "https://169.254.169.254/computeMetadata/v1/",
    "https://10.0.0.1/x",
    "https://[::1]:{port}/x",
    "ftp://127.0.0.1:{port}/x",
    "simplecache::https://127.0.0.1:{port}/x",
    "file:///etc",
    "local:///etc",
    "memory://x",
    "gs://bucket/../other",
    "zip://x::file:///etc",
)


@pytest.mark.slow
def test_data_comes_from_no_host_and_no_folder_but_the_allowed(head, cost):
    """``test_public_https.py`` of the agents' tests has redirects and names that lead there."""
    package, (before, training) = f"{'0' * 64}-1", JOB.split("[training]")
    described = inline_description(read_job(f"{before}[training]{training}").model)
    toml = f'script = "train.py"\ndescription = {toml_value(described)}'
    training = f"[training]{training}"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        codes = {}
        for uri in BAD_DATA:
            where = uri.format(port=port)
            mounted = f'[work]\npackage = "{package}"\n[data.mounts]\nx = "{where}"\n'
            job = f"[model]\n{toml}\n{training}\n{mounted}"
            codes[uri] = head.ask("POST", "/v1/jobs", {"job": job})
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert {code for code, _ in codes.values()} == {422}, codes
    assert all("not where jobs may have data" in str(said) for _, said in codes.values()), codes
    cost("10 data of a job: 13 kinds of hosts and folders", "the agent connected",
         "422 each; no connection")  # fmt: skip
