"""Gathers, sums of parts and sums on one rank, between processes, threads and in a measurement."""

from __future__ import annotations

import pytest
import torch

from tests.worker import rank_processes
from tests.worker.rank_processes import exchanged, exchanged_by
from tests.worker.threads import run_as_threads
from worker.layer_profiles.null_collective import NullCollective

RANKS = 3
WANTED = [exchanged_by(rank, RANKS) for rank in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_processes_gather_and_sum_and_number_each(tmp_path, dtype):
    found = rank_processes.as_processes(tmp_path, RANKS, rank_processes.exchange_parts, dtype)
    assert found == [(*wanted, 3) for wanted in WANTED]


def test_threads_gather_and_sum():
    assert run_as_threads(RANKS, lambda at: exchanged(at.group((0, 1, 2)))) == WANTED


def test_one_device_stands_for_all_ranks_in_a_measurement():
    group = NullCollective(2)
    assert group.all_gather(torch.ones(3)).tolist() == [[1.0] * 3] * 2
    assert group.reduce_scatter(torch.ones(2, 3)).tolist() == [1.0] * 3
