"""A local cluster that does not start: how long that is waited for, and where its logs stay."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sailord.cli import local_cluster
from sailord.local import cluster
from sailord.local.cluster import START_S, ClusterError, LocalCluster
from sailord.local.paths import MARKER, LocalFolders


def test_the_limit_counts_from_the_last_node_that_became_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node becomes ready shortly before the limit, until no further one does."""
    passed = [0.0]
    clock: Any = SimpleNamespace(
        monotonic=lambda: passed[0], sleep=lambda _: passed.__setitem__(0, passed[0] + START_S / 4)
    )
    monkeypatch.setattr(cluster, "time", clock)
    starting = LocalCluster(LocalFolders(tmp_path, port=1))

    def ready() -> int:
        return min(int(passed[0] / START_S * 4 / 3), 5)

    starting.wait("the nodes", lambda: ready() == 5, ready)
    assert passed[0] > 3 * START_S
    with pytest.raises(ClusterError, match=f"the nodes did not start within {START_S:.0f} s"):
        starting.wait("the nodes", lambda: ready() == 6, ready)


def test_the_logs_of_a_cluster_that_failed_stay_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / MARKER).touch()
    place = LocalFolders(folder, port=1)
    monkeypatch.setattr(local_cluster, "ended_by_signals", contextlib.nullcontext)
    monkeypatch.setattr(local_cluster, "ignore", lambda: None)
    failing: Any = SimpleNamespace(claim=lambda: None, close=place.remove, place=place)

    def fail() -> int:
        raise ClusterError("the nodes did not start")

    (folder / "a1.log").write_text("no memory left")
    assert local_cluster._run_cluster(failing, fail) == 1
    error, said = capsys.readouterr().err.splitlines()
    assert error == "error: the nodes did not start"
    kept = Path(said.removeprefix("the logs are kept in "))
    assert (kept / "a1.log").read_text() == "no memory left"
    assert kept.parent == tmp_path
    assert not folder.exists()
    local_cluster._run_cluster(failing, fail)
    assert len(capsys.readouterr().err.splitlines()) == 1, "there is no log"
