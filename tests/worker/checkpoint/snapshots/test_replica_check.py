"""Holders of durable state are compared, and a difference is reported before it spreads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from simulator.models.families import build_model
from simulator.spec.job import Checkpoint, Job
from simulator.spec.plan import Place, Plan
from tests.worker.checkpoint.fetching import restore_from
from tests.worker.checkpoint.test_load_state import JOBS
from tests.worker.threads import ThreadTransport, run_as_threads
from tests.worker.training_runs import SomeLabels, alone, plan_of, small_job, trained
from worker.checkpoint.piece_sources import LocalSource
from worker.checkpoint.snapshots.replica_check import check_replicas, contradicted
from worker.checkpoint.snapshots.snapshot_manager import (
    SnapshotManager,
    SnapshotTarget,
    check_state,
)
from worker.distributed.interface import AbortedError
from worker.distributed.single_rank import SingleRankTransport
from worker.layout.tensor_table import tensors_of
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.trainer import RankTrainer

JOB = small_job(tied=True)
ALL = tuple(range(len(JOB.model.layers)))


def plan_on(*kinds: str, job: Job = JOB, nodes: str = "") -> Plan:
    """Return a plan with one replica on each GPU kind, by default on a node of that name."""
    last, each = len(job.model.layers), job.global_batch // len(kinds)
    counts = [job.global_batch - each * (len(kinds) - 1), *[each] * (len(kinds) - 1)]
    plan = plan_of(1, *[(count, [(0, last, 1)]) for count in counts])
    pipelines = tuple(
        replace(line, stages=(replace(line.stages[0], places=(Place(kind, "m", "z", node=node),)),))
        for line, kind, node in zip(plan.pipelines, kinds, nodes or kinds, strict=True)
    )
    return replace(plan, pipelines=pipelines)


def flip(flat: torch.Tensor, place: int, bit: int | None) -> None:
    """Flip one bit of one element; ``None``: make it a number that is not finite."""
    if bit is None:
        flat[place] = torch.nan
        return
    flat.view({4: torch.int32, 8: torch.int64}[flat.element_size()])[place] ^= 1 << bit


def said(
    memory: Path,
    plan: Plan,
    *,
    flipped_at: int | None,
    stop_at: int = 99,
    bit: int | None = 16,
    job: Job = JOB,
    persist_every: int | None = 2,
    layers: tuple[int, ...] = (1,),
) -> list[str]:
    """Return each rank's error in 4 steps, every second one durable; rank 1 has wrong bits."""

    def body(transport: ThreadTransport) -> str:
        rank = transport.rank
        trainer = RankTrainer(job, plan, rank, transport, SomeLabels(job))
        node = plan.pipelines[rank].stages[0].places[0].node or ""
        target = SnapshotTarget("j", 1, 1, node, memory / str(rank), 1, persist_every, {})
        keeper = SnapshotManager.open(trainer, target, transport)
        trainer.snapshot_hook = keeper
        keeper.replicated(99)
        try:
            for step in range(1, min(stop_at, 4) + 1):
                trainer.step()
                if (step, rank) == (flipped_at, 1):
                    for layer in layers:
                        flip(trainer.buffers[layer].master, 3, bit)
                keeper.after_step()
            keeper.seal_at_stop(persist=False)
        except ReplicaMismatchError as error:
            keeper.withdraw_if_blamed(error)
            return f"{error} (agreed at {error.agreed_at})"
        finally:
            keeper.close()
        return ""

    return run_as_threads(len(plan.pipelines), body)


def test_equal_replicas_pass(tmp_path):
    assert said(tmp_path, plan_on("a", "a"), flipped_at=None) == ["", ""]


@pytest.mark.parametrize(("flipped_at", "seen_at"), [(1, 2), (2, 2)])
def test_of_two_holders_none_can_be_blamed_for_a_wrong_bit(tmp_path, flipped_at, seen_at):
    first, second = said(tmp_path, plan_on("a", "a"), flipped_at=flipped_at)
    assert f"of layer 1 after {seen_at} steps differs between its holders" in first
    assert "rank 0 on node a and rank 1 on node a: no majority agrees" in first
    assert second == first


def test_rank_that_most_holders_contradict_is_named_with_its_node(tmp_path):
    plan = plan_on("a", "a", "a")
    found = said(tmp_path, plan, flipped_at=2)
    assert "after 2 steps differs between its holders, and most contradict rank 1 on" in found[0]
    assert len(set(found)) == 1, "all ranks say the same"


def test_rank_that_most_holders_contradict_withdraws_its_snapshots(tmp_path):
    """So the next generation restores what the others keep; of each piece that is enough."""
    plan = plan_on("a", "a", "a", nodes="abc")
    right = trained(JOB, plan, steps=2, compare=False).state
    said(tmp_path, plan, flipped_at=2, layers=ALL)
    files = [len(list((tmp_path / str(rank)).rglob("*.snap"))) for rank in range(3)]
    assert files[1] == 0
    assert files[0] > 0
    restored = restored_alone(tmp_path)
    for key, values in right.items():
        assert key[2] == "gradient" or torch.equal(restored[key], values), key


def restored_alone(memory: Path) -> dict:
    """Return the state that one rank restores from what three ranks have kept of step 2."""
    sources = [
        replace(LocalSource.at(memory / str(rank), "j", generation=1, step=2), name=str(rank))
        for rank in range(3)
    ]
    trainer = RankTrainer(JOB, alone(JOB), 0, SingleRankTransport(), SomeLabels(JOB))
    restore_from(trainer, sources)
    return merge_ranks([rank_tensors(trainer.buffers.values())], tensors_of(JOB))


def test_the_only_copy_of_a_piece_stays_though_its_rank_is_contradicted(tmp_path):
    """On one node each piece is kept once."""
    found = said(tmp_path, plan_on("a", "a", "a", nodes="aaa"), flipped_at=2, layers=ALL)
    assert restored_alone(tmp_path)
    assert all("its snapshots stay" in text for text in found)


@pytest.mark.parametrize(
    ("blamed", "keys", "withdraws"),
    [
        ((1,), ["x"], True),
        ((1,), ["y"], True),
        ((1,), ["z"], False),
        ((2,), ["x"], False),
        ((), ["x"], False),
        ((0, 1), ["x"], False),
    ],
    ids=["blamed", "another piece", "a piece not kept", "not blamed", "nobody", "all keepers"],
)
def test_rank_withdraws_only_wrong_copies_that_others_have_right(blamed, keys, withdraws):
    done = []
    keeper = SimpleNamespace(
        trainer=SimpleNamespace(rank=1),
        placement=SimpleNamespace(
            holders={"x": (0, 1), "y": (1, 2), "z": (0, 2), "empty": (0, 1)},
            sizes={"x": 4, "y": 4, "z": 4, "empty": 0},
        ),
        writer=SimpleNamespace(withdraw=lambda: done.append("withdrawn")),
    )
    error = ReplicaMismatchError("differs", blamed=blamed, keys=keys)
    assert SnapshotManager.withdraw_if_blamed(keeper, error) is withdraws
    assert done == ["withdrawn"] * withdraws


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_no_rank_fails_before_all_know_who_differs(is_cut_short):
    """The first one that fails aborts the others, which would then report a lost peer."""

    def body(transport: ThreadTransport) -> tuple[int, str]:
        group, done = transport.group((0, 1)), []

        def reads(values: torch.Tensor) -> list:
            done.append(values.numel())
            if is_cut_short and values.numel() == 1:
                raise AbortedError("differs", rank=0)
            return type(group).read_sum(group, values)

        group.read_sum = reads
        try:
            check_replicas(
                {(0, 0): transport.rank},
                [(0, 0)],
                group,
                nodes={0: "a", 1: "b"},
                device=torch.device("cpu"),
                what="now",
            )
        except ReplicaMismatchError as error:
            return done, str(error)
        return done, ""

    for done, text in run_as_threads(2, body):
        assert done == [4, 1]
        assert "differs between its holders" in text


@pytest.mark.parametrize(("every", "seen_at"), [(1, 2), (3, 3), (0, 4), (20, 4)])
def test_wrong_bit_is_found_without_a_place_for_checkpoints(tmp_path, every, seen_at):
    """As often as the job asks for, and at a stop."""
    job = replace(JOB, checkpoint=Checkpoint(compare_every=every))
    found = said(tmp_path, plan_on("a", "a"), flipped_at=2, job=job, persist_every=None)
    assert f"after {seen_at} steps differs" in found[0]


def test_rank_whose_wrong_bit_makes_the_loss_infinite_is_named(tmp_path):
    """The comparison comes before the error of the number that is not finite."""
    job = replace(JOB, skip_nonfinite=0)
    plan = plan_on("a", "a", "a")
    found = said(tmp_path, plan, flipped_at=2, bit=None, job=job, persist_every=None)
    assert "after 2 steps differs between its holders, and most contradict rank 1 on" in found[0]


@pytest.mark.parametrize("bit", [0, 31, 39, 40, 52, 62])
def test_any_bit_of_a_wide_number_counts(tmp_path, bit):
    model = build_model("exact", layers=2, hidden=16, heads=4, ffn=24, vocab=30, sequence=6)
    job = Job("exact", model, global_batch=8, sequence=6, max_tp=4, learning_rate=0.01)
    found = said(tmp_path, plan_on("a", "a", job=job), flipped_at=2, bit=bit, job=job)
    assert "after 2 steps differs" in found[0]


def test_wrong_bit_is_named_at_a_stop(tmp_path):
    first, second = said(tmp_path, plan_on("a", "a"), flipped_at=2, stop_at=2)
    assert "after 2 steps" in first
    assert "after 2 steps" in second


@pytest.mark.parametrize(("flipped_at", "agreed_at"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_last_step_after_which_all_agreed_is_reported(tmp_path, flipped_at, agreed_at):
    """What was trained since then may be wrong on all ranks."""
    job = replace(JOB, checkpoint=Checkpoint(compare_every=1))
    found = said(tmp_path, plan_on("a", "a"), flipped_at=flipped_at, job=job, persist_every=None)
    assert found[0].endswith(f"(agreed at {agreed_at})")
    assert found[1] == found[0]


def test_other_gpu_kinds_may_round_differently(tmp_path):
    assert said(tmp_path, plan_on("a", "b"), flipped_at=2) == ["", ""]


@pytest.mark.parametrize(
    ("digests", "blamed"),
    [
        ({0: 5, 3: 6}, ()),
        ({0: 5, 3: 6, 4: 5}, (3,)),
        ({0: 5, 1: 6, 2: 7}, ()),
        ({0: 5, 1: 5, 2: 6, 3: 6}, ()),
        ({0: 6, 1: 5, 2: 5, 3: 5, 4: 7}, (0, 4)),
    ],
)
def test_majority_contradicts_the_others(digests, blamed):
    assert contradicted(digests) == blamed


@pytest.mark.parametrize("name", ["tied", "bf16", "exact", "fp16-zero"])
def test_equal_replicas_pass_in_any_layout(name):
    """Ranks with one atom, two, and all of them add the same bits in another order."""
    job = JOBS[name]
    last = len(job.model.layers)
    plan = plan_of(1, (3, [(0, last, 4)]), (3, [(0, last, 2)]), (2, [(0, 2, 1), (2, last, 1)]))

    def body(transport: ThreadTransport) -> None:
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        for _ in range(2):
            check_state(trainer)
            trainer.step()
        check_state(trainer)

    run_as_threads(plan.device_count, body)


@pytest.mark.parametrize("what", ["master", "moments"])
def test_restored_state_is_compared_with_its_moments(what):
    def body(transport: ThreadTransport) -> str:
        plan = plan_of(1, (4, [(0, 5, 2)]), (4, [(0, 2, 1), (2, 5, 1)]))
        trainer = RankTrainer(JOB, plan, transport.rank, transport, SomeLabels(JOB))
        check_state(trainer)
        if transport.rank == 2:
            buffer = trainer.buffers[1]
            flip(buffer.master if what == "master" else buffer.moments[1], 3, 7)
        try:
            check_state(trainer)
        except ReplicaMismatchError as error:
            return str(error)
        return ""

    found = run_as_threads(4, body)
    assert "of layer 1 as restored differs between its holders" in found[0]
    assert "rank 2" in found[0]
    assert len(set(found)) == 1


def test_no_rank_is_blamed_for_bits_that_were_restored():
    """Two ranks that have read one wrong copy would outvote the one with the right copy."""

    def body(transport: ThreadTransport) -> ReplicaMismatchError | None:
        plan = plan_on("a", "a", "a", nodes="abc")
        trainer = RankTrainer(JOB, plan, transport.rank, transport, SomeLabels(JOB))
        if transport.rank != 1:
            flip(trainer.buffers[1].master, 3, 7)
        try:
            check_state(trainer)
        except ReplicaMismatchError as error:
            return error
        return None

    for error in run_as_threads(3, body):
        assert error.blamed == ()
        assert "as restored differs between its holders, rank 0 on node a and rank 1" in str(error)
        assert "roll back to a checkpoint" in str(error)
