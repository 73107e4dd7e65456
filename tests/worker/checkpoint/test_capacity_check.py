"""The check whether a node has room for its snapshots, before training and with the bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.control.fake_agents import plan_of
from tests.worker.training_runs import small_job
from worker.checkpoint import capacity_check, snapshot_file
from worker.checkpoint.capacity_check import (
    NodeNeed,
    check_room,
    host_memory,
    node_need,
    usual_room,
)
from worker.checkpoint.placement import SnapshotPlacement, sizes_of, state_shape
from worker.layout.tensor_table import holdings_for

KEYS = {(0, 0): 1000, (0, 1): 200, (1, 0): 30}
ROOT = Path(__file__).resolve().parents[3]


def sharing(buddies: dict[tuple[int, int], str], *, waits: bool) -> SnapshotPlacement:
    """Ranks 0 and 1 on ``a``, rank 2 on ``b``; rank 2 also holds the first piece."""
    holders = {(0, 0): (0, 2), (0, 1): (0, 1), (1, 0): (1,)}
    nodes = {0: "a", 1: "a", 2: "b"}
    return SnapshotPlacement(KEYS, holders, dict.fromkeys(KEYS, 0), nodes, buddies, waits)


def test_node_needs_room_for_all_its_ranks_and_for_replicas():
    shared = sharing({(0, 1): "b", (1, 0): "b"}, waits=True)
    assert node_need(shared, "a") == NodeNeed(own=1000 + 2 * 200 + 30, copies=0, files=3)
    assert node_need(shared, "b") == NodeNeed(own=1000, copies=230, files=3)
    assert node_need(sharing({}, waits=False), "b") == NodeNeed(own=1000, copies=0, files=2)
    assert node_need(shared, "b").now == 3 * 1000 + 3 * 230
    assert node_need(shared, "b").during_change == 5 * 1000 + 3 * 230


MIB = 1 << 20
NEED = NodeNeed(own=10 * MIB, copies=2 * MIB, files=2)  # 26 MiB now, 46 in a reconfiguration


def put(folder: Path, name: str, mib: int) -> None:
    path = folder / "job" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(mib * MIB)


@pytest.mark.parametrize(
    ("free_mib", "ours", "left", "missing"),
    [
        (46, 0, 0, None),
        (45, 0, 0, (46, 45)),
        (26, 20, 0, None),  # Other ranks of this node have reserved theirs.
        (26, 0, 20, None),  # The previous generation's files exist already.
        (25, 0, 21, (26, 25)),
        (26, 0, 10, (36, 26)),
    ],
    ids=["fits", "no change", "reserved", "left", "full of what is left", "too little left"],
)
def test_existing_files_count_as_used_room(tmp_path, monkeypatch, free_mib, ours, left, missing):
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: free_mib * MIB)
    put(tmp_path, ".4.0.77.0.part", ours)
    put(tmp_path, "3-20/0.snap", left)
    put(tmp_path, "not-a-point/x", 99)
    if missing is None:
        check_room(NEED, tmp_path, "job", 4)
        return
    with pytest.raises(snapshot_file.NoRoomError) as raised:
        check_room(NEED, tmp_path, "job", 4)
    needed, there = missing
    assert raised.value.needed_bytes == needed * MIB
    assert raised.value.filename == str(tmp_path)
    text = raised.value.strerror
    assert f"{needed}.0 MiB are needed on this node" in text
    assert f"{there}.0 MiB are free; enlarge that file system" in text


def test_folder_in_memory_is_bounded_by_its_limit_and_the_machine(tmp_path):
    """Measured on a small tmpfs, one without a limit, and a disk."""
    program = (
        "import sys; from pathlib import Path\n"
        "from worker.checkpoint.free_space import free_bytes\n"
        "print(*(free_bytes(Path(name)) for name in sys.argv[1:]))"
    )
    names = [tmp_path / name for name in ("small", "vast")]
    for name in names:
        name.mkdir()
    mounts = (
        f"mount -t tmpfs -o size=3m none {names[0]} && mount -t tmpfs -o size=0 none {names[1]}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", program,
         str(names[0] / "not" / "yet"), str(names[1])],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if "not permitted" in done.stderr.lower():
        pytest.skip("nothing can be mounted here")
    small, vast = map(int, done.stdout.split())
    assert small == 3 * MIB
    assert 0 < vast < 1 << 50


JOB = small_job(tied=True)


@pytest.mark.parametrize(
    ("plan", "nodes", "more"),
    [
        (plan_of((5, [(0, 5, 1, "a")]), (3, [(0, 5, 1, "b")])), "ab", 0),
        (plan_of((8, [(0, 5, 2, "a")])), "ab", 0),
        (plan_of((4, [(0, 5, 1, "a")]), (2, [(0, 5, 1, "b")]), (2, [(0, 5, 2, "c")])), "abc", 0),
        # Its shared tensors are on both nodes, the others on one.
        (plan_of((8, [(0, 2, 2, "a"), (2, 5, 1, "b")])), "ab", 0.25),
    ],
    ids=["replicas", "one node", "three replicas", "one pipeline"],
)
def test_rooms_of_all_nodes_add_up_to_what_submit_says(plan, nodes, more):
    needs = host_memory(JOB, plan, dict.fromkeys(nodes, "z"))
    assert set(needs) <= set(nodes)
    whole = sum(need.during_change for need in needs.values())
    if len(needs) == 1:  # The other node, which has the replicas, is not in the plan.
        whole += capacity_check.COPIES * whole // 5
    assert usual_room(JOB) <= whole <= usual_room(JOB) * (1 + more)
    assert usual_room(JOB) == 8 * sum(sizes_of(holdings_for(plan, JOB), state_shape(JOB)).values())
