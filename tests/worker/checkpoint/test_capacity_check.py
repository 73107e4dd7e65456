"""The check whether a node has room for its snapshots, before training and with the bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
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
    assert node_need(shared, "a") == NodeNeed(1000 + 2 * 200 + 30, 0, files=3, first_files=3)
    assert node_need(shared, "b") == NodeNeed(1000, copies=230, files=3, first_files=3)
    assert node_need(sharing({}, waits=False), "b") == NodeNeed(1000, 0, files=2, first_files=1)
    assert node_need(shared, "b").first == 3 * 1000 + 3 * 230
    assert node_need(shared, "b").during_change == 5 * 1000 + 3 * 230


def test_without_replicas_each_keeper_has_room_for_three_files_at_most():
    """Two that are left and the first; later two, and one that is uploaded."""
    assert node_need(sharing({}, waits=False), "b").during_change == 3 * 1000


MIB = 1 << 20
NEED = NodeNeed(own=10 * MIB, copies=2 * MIB, files=2, first_files=1)
"""16 MiB to begin, 26 for all files, 36 in a reconfiguration."""
NEEDED = [(3, 20), (3, 10)]
"""The generation begins from the first of these, and may need the second."""


def put(folder: Path, name: str, mib: int) -> None:
    path = folder / "job" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(mib * MIB)


@pytest.mark.parametrize(
    ("free_mib", "ours", "left", "expected"),
    [
        (36, 0, {}, True),
        (35, 0, {}, (36, 35)),
        (16, 20, {}, True),  # Other ranks of this node have reserved theirs.
        (26, 0, {"3-20": 10}, True),
        (16, 0, {"3-20": 20}, False),  # Only the first file fits beside what is left.
        (15, 0, {"3-20": 21}, (16, 15)),
        (16, 0, {"3-20": 10}, (26, 16)),
        (15, 0, {"3-10": 10, "3-20": 11}, (16, 15)),
        (6, 0, {"3-10": 10, "3-15": 10, "3-20": 10}, False),
        (6, 0, {"3-10": 10, "3-20": 10, "3-25": 10}, False),
        (5, 0, {"3-10": 10, "3-15": 10, "3-20": 11}, (6, 5)),
    ],
    ids=[
        "fits",
        "no change",
        "reserved",
        "beside what is left",
        "only the first",
        "full of what is left",
        "too little left",
        "what may be needed stays",
        "the agent can delete one between",
        "the agent can delete one after",
        "that does not suffice",
    ],
)
def test_existing_files_count_as_used_room(tmp_path, monkeypatch, free_mib, ours, left, expected):
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: free_mib * MIB)
    put(tmp_path, ".4.0.77.0.part", ours)
    for point, mib in left.items():
        put(tmp_path, f"{point}/0.snap", mib)
    put(tmp_path, "not-a-point/x", 99)
    if isinstance(expected, bool):
        assert check_room(NEED, tmp_path, "job", 4, NEEDED) == expected
        return
    with pytest.raises(snapshot_file.NoRoomError) as raised:
        check_room(NEED, tmp_path, "job", 4, NEEDED)
    needed, there = expected
    assert raised.value.needed_bytes == needed * MIB
    assert raised.value.filename == str(tmp_path)
    text = raised.value.strerror
    assert f"{needed}.0 MiB are needed on this node" in text
    assert f"{there}.0 MiB are free; enlarge that file system" in text


def test_agent_deletes_nothing_for_a_leader_that_does_not_say_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: 15 * MIB)
    put(tmp_path, "3-20/0.snap", 100)
    with pytest.raises(snapshot_file.NoRoomError):
        check_room(NEED, tmp_path, "job", 4, None)
    assert not check_room(NEED, tmp_path, "job", 4, [])


def test_where_all_may_be_needed_there_is_room_for_four_files(tmp_path, monkeypatch):
    """46 MiB: two of each rank, two more in a reconfiguration, and replicas."""
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: 46 * MIB)
    assert check_room(NEED, tmp_path, "job", 4, None)
    put(tmp_path, "3-20/0.snap", 20)
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: 26 * MIB)
    assert check_room(NEED, tmp_path, "job", 4, None)
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: 25 * MIB)
    with pytest.raises(snapshot_file.NoRoomError, match="2 for each rank"):
        check_room(NEED, tmp_path, "job", 4, None)


def test_job_that_must_survive_a_zone_needs_room_for_four_files():
    plan = plan_of((5, [(0, 5, 1, "a")]), (3, [(0, 5, 1, "b")]))
    far = replace(JOB, checkpoint=replace(JOB.checkpoint, survive="zone"))
    zones = {"a": "y", "b": "z"}
    three, four = (host_memory(job, plan, zones)["a"].during_change for job in (JOB, far))
    assert (three * 4, usual_room(JOB) * 8) == (four * 3, usual_room(far) * 6)


def test_what_waited_for_upload_as_the_generation_ended_will_go(tmp_path, monkeypatch):
    """The agent drops its second name as it joins the next one, but that takes a moment."""
    monkeypatch.setattr(capacity_check, "free_bytes", lambda _: 0)
    put(tmp_path, "3-10/0.snap", 10)
    put(tmp_path, "3-20/0.snap", 10)
    links = tmp_path / snapshot_file.LINKS
    links.mkdir()
    (links / "job.3.20.0").hardlink_to(tmp_path / "job" / "3-20" / "0.snap")
    with pytest.raises(snapshot_file.NoRoomError):
        check_room(NEED, tmp_path, "job", 4, NEEDED)
    put(tmp_path, "0.snap", 16)
    (tmp_path / "job" / "0.snap").rename(links / "job.other.3.15.0")
    with pytest.raises(snapshot_file.NoRoomError):
        check_room(NEED, tmp_path, "job", 4, NEEDED)
    (links / "job.other.3.15.0").rename(links / "job.3.15.0")
    assert not check_room(NEED, tmp_path, "job", 4, NEEDED)


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
        # They wait for replicas.
        (plan_of((8, [(0, 5, 2, "a")])), "ab", 0.34),
        (plan_of((4, [(0, 5, 1, "a")]), (2, [(0, 5, 1, "b")]), (2, [(0, 5, 2, "c")])), "abc", 0),
        # Its shared tensors are on both nodes, the others on one.
        (plan_of((8, [(0, 2, 2, "a"), (2, 5, 1, "b")])), "ab", 0.67),
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
    state = sum(sizes_of(holdings_for(plan, JOB), state_shape(JOB)).values())
    assert usual_room(JOB) == 6 * state
    assert usual_room(replace(JOB, zero=1)) == 8 * state
