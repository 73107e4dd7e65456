"""Uploads to a full or read-only file system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.sealing import write_snapshot

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, subprocess, sys
from pathlib import Path
from agents.snapshots.upload import reason_of, upload_pieces
from sailord.checkpoints.object_storage import StorageError, open_storage
from worker.checkpoint import snapshot_file

far, found = Path(sys.argv[1]), []
def bring(name, path=Path(sys.argv[2])):
    header = snapshot_file.read_header(path)
    try:
        upload_pieces(f"file://{far}/job/{name}", path, header)
    except Exception as error:
        found.append(reason_of(error))
    else:
        found.append("done")
    try:
        open_storage(f"file://{far}").write(f"job/{name}.json", bytes(path.stat().st_size))
    except StorageError as error:
        found.append(str(error).replace(str(far), "FAR"))
    else:
        found.append("done")
def mount(*options):
    subprocess.run(["mount", *options, str(far)], check=True)

mount("-t", "tmpfs", "-o", "size=64k", "none")
bring("full")
left = [str(path.relative_to(far)) for path in far.rglob("*") if path.is_file()]
mount("-o", "remount,size=4m")
bring("roomy")
mount("-o", "remount,ro")
bring("closed")
print(json.dumps([found, left]))
"""


def test_a_full_or_read_only_store_is_reported_with_its_cure_and_left_clean(tmp_path):
    header = write_snapshot(tmp_path / "own", step=5, pieces={(0, 0): bytes(200_000)})
    (tmp_path / "far").mkdir()
    path = tmp_path / "own" / "job" / "1-5" / header.file_name
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", PROGRAM, str(tmp_path / "far"), str(path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if "not permitted" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout)
    assert found == [
        "the storage is full: make room there",
        "file://FAR/job/full.json cannot be written: the storage is full",
        "done",
        "done",
        "the file system is read-only: mount it for writing on this node",
        "file://FAR/job/closed.json cannot be written: the file system is read-only",
    ]
    assert left == []
