"""Ranks as processes train as threads do, and do not wait for dead peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worker import rank_processes
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import drawn, plan_of, small_job, trained
from worker.profiling.fault_injection import FailPoint
from worker.training.precision import FP64

JOB = small_job(dropout=0.1)
RANKS = 5
FOUR = [(0, 1, 1), (1, 3, 2), (3, 4, 1), (4, 5, 2)]
INTERLEAVED = replace(
    plan_of(1, (4, FOUR), (4, [(*span, 1) for *span, _ in FOUR])),
    schedule="interleaved",
    virtual_stages=2,
)


@pytest.mark.slow
def test_processes_match_threads_across_generations(tmp_path, examples):
    plans = [
        any_plan(drawn(f"processes {n}"), JOB, ranks_max=RANKS)
        for n in range(max(3, examples // 10))
    ]
    plans[1:1] = [INTERLEAVED, replace(INTERLEAVED, sequence_parallel=True)]
    ranks = rank_processes.as_processes(
        tmp_path, RANKS, rank_processes.train_generations, JOB, plans, 2
    )
    for number, plan in enumerate(plans):
        found = [results[number] for results, _ in ranks if results[number] is not None]
        wanted = trained(JOB, plan, steps=2, precision=FP64)
        for reports, _ in found:
            assert reports == found[0][0], plan
            for (loss, norm, digest), report in zip(reports, wanted.reports, strict=True):
                assert loss == pytest.approx(report.loss, rel=1e-12), plan
                assert norm == pytest.approx(report.grad_norm, rel=1e-9), plan
                assert digest == report.sample_hash, plan
        known: dict[object, str] = {}
        for _, sums in found:
            for key, digest in sums.items():
                assert known.setdefault(key, digest) == digest, f"{plan}: {key}"
    for _, left in ranks:
        assert len(set(left)) == 1, "a generation leaves files open"


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["forward", "backward", "send", "receive", "sync", "vote", "step"]
)
def test_all_ranks_notice_a_death_in_any_phase(tmp_path, phase):
    plan = plan_of(2, (2, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 3, 1), (3, 5, 1)]))
    killed = {"send": 0, "receive": 4}.get(phase, 2)
    results = rank_processes.as_processes(
        tmp_path, RANKS, rank_processes.train_until_lost, JOB, plan, FailPoint(killed, phase, 2)
    )
    assert results == [None if n == killed else ("PeerLostError", killed) for n in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["all-reduce", "reduce", "all-gather", "reduce-scatter", "send", "receive", "others"]
)
def test_no_wait_outlasts_the_death_of_a_peer(tmp_path, what):
    results = rank_processes.as_processes(tmp_path, 3, rank_processes.wait_for_the_dead, what)
    assert results[0] is None
    for (kind, rank), message in results[1:]:
        assert (kind, rank) == ("PeerLostError", 0)
        assert message.startswith("rank 0 is lost (noticed in ")


def test_opening_a_group_fails_if_a_member_is_lost(tmp_path):
    results = rank_processes.as_processes(tmp_path, 3, rank_processes.wait_for_one_who_never_joins)
    assert results == [None, ("PeerLostError", 0), ("PeerLostError", 0)]


def test_a_rank_that_gloo_waits_for_in_vain_is_given_up_and_its_process_not_used_again(tmp_path):
    results = rank_processes.as_processes(tmp_path, 3, rank_processes.connect_to_one_who_dies)
    assert results == [None, *[(("PeerLostError", 0), ["a group did not open"])] * 2]


def test_abort_tells_the_peers_the_reason(tmp_path):
    results = rank_processes.as_processes(tmp_path, 3, rank_processes.abort_while_others_wait)
    assert results == ["rank 1: bad sample"] * 3


@pytest.mark.slow
def test_silent_peer_is_waited_for_until_the_deadline(tmp_path):
    results = rank_processes.as_processes(tmp_path, 2, rank_processes.outlast_the_deadline)
    assert ("DeadlineError", None) in results
    assert {kind for kind, _ in results} <= {"DeadlineError", "AbortedError"}
