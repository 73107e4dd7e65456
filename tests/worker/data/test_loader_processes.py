"""Samples loaded by processes: the same ones, in order, and nothing left of the processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from simulator.documents.problems import InputError
from worker.data.batch import Samples
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.generator_turns import turn
from worker.data.read_ahead import ReadAhead

pytestmark = pytest.mark.torch

POSITIONS = (range(2), range(2, 4), range(4, 6))


def nothing_lost():
    """All ranks are there."""


class Drawn:
    """Samples that are drawn at random, and say which process drew them."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(3), torch.tensor(random.randrange(10**6)), torch.tensor(index)


class Asked:
    """What a function returns, by step and position."""

    def __init__(self, act):
        self.act = act

    def batch(self, step, positions):
        return Samples(self.act(step, positions), None, torch.zeros(1))


@pytest.fixture
def ahead():
    made = []

    def make(source, **more):
        given = {"steps": 3, "check": nothing_lost, "processes": 2} | more
        made.append(ReadAhead(source, POSITIONS, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def all_of(loading, steps=3):
    return [loading.batch(step, each) for step in range(steps) for each in POSITIONS]


def test_processes_load_what_a_thread_would(ahead):
    data = MapData(Drawn(), default_collate, 6, seed=1)
    before = torch.random.get_rng_state()
    found = all_of(ahead(data))
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = all_of(ahead(data, processes=0))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.digests, other.digests)
        for mine, theirs in zip(one.inputs, other.inputs, strict=True):
            assert torch.equal(mine, theirs)


def test_several_processes_load(ahead):
    loading = ahead(Asked(lambda *_: os.getpid()))
    pids = {each.inputs for each in all_of(loading)}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_step_can_be_repeated(ahead):
    loading = ahead(Asked(lambda step, positions: (step, positions.start)))
    asked = [(0, 0), (0, 1), (0, 0), (2, 1), (2, 2)]
    found = [loading.batch(step, POSITIONS[number]).inputs for step, number in asked]
    assert found == [(step, POSITIONS[number].start) for step, number in asked]


def test_an_error_of_a_data_set_is_raised_with_its_own_traceback(ahead):
    def fail(step, positions):
        if (step, positions.start) == (1, 2):
            raise KeyError("what is wrong")
        return 0

    loading = ahead(Asked(fail))
    for step, number in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        loading.batch(step, POSITIONS[number])
    with pytest.raises(KeyError, match="what is wrong") as told:
        loading.batch(1, POSITIONS[1])
    assert told.traceback[-1].name == "fail"


def test_a_killed_process_is_told_with_its_cure(ahead):
    def kill(step, _):
        if step:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(InputError, match=r"by 2 processes: .+smaller num_workers"):
        all_of(ahead(Asked(kill)))


def test_connections_of_the_rank_end_when_the_rank_closes_them(ahead):
    ours, theirs = socket.socketpair()
    all_of(ahead(Asked(lambda *_: 0), steps=None), steps=1)
    ours.close()
    theirs.settimeout(30)
    assert theirs.recv(1) == b""
    theirs.close()


def test_a_turn_of_a_thread_does_not_last_in_the_processes(ahead):
    data = MapData(Drawn(), default_collate, 6, seed=1)
    loading = ahead(data)
    with turn():
        assert len(all_of(loading)) == 9


def test_signals_to_the_group_leave_the_processes_to_their_parent(ahead):
    def own(_step, _positions):
        return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    (found, *_) = all_of(ahead(Asked(own)))
    assert found.inputs == [signal.SIG_IGN, signal.SIG_IGN]


def test_processes_end_with_a_rank_that_is_killed():
    read, write = os.pipe()

    def hang(step, _positions):
        os.write(write, b"x")
        time.sleep(3600 if step else 0)

    rank = os.fork()
    if rank == 0:
        os.close(read)
        loading = ReadAhead(Asked(hang), POSITIONS, steps=None, check=nothing_lost, processes=2)
        loading.batch(0, POSITIONS[0])
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    os.waitpid(rank, 0)
    # The pipe ends once nobody holds its other end.
    with os.fdopen(read, "rb") as end:
        assert set(end.read()) == set(b"x")
