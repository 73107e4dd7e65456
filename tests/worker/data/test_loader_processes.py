"""Samples loaded by processes: the same ones, in order, and nothing left of the processes."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import socket
import time
from dataclasses import make_dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from simulator.documents.problems import InputError
from worker.data.batch import Samples
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.generator_turns import turn
from worker.data.loader_processes import _Sent
from worker.data.read_ahead import ReadAhead

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


class Records:
    """Numbered records of a file, which is opened when it is first read and stays open."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(4096 * index)
        record = self.file.read(4096)
        return torch.tensor([index, record[0], record[-1], len(set(record))])


def test_processes_do_not_move_each_other_in_a_file(ahead, tmp_path):
    path = tmp_path / "records"
    path.write_bytes(b"".join(bytes([number]) * 4096 for number in range(256)))
    data = Records(path)
    assert data[0].tolist() == [0, 0, 0, 1]  # Opened before there are processes.
    loading = ahead(MapData(data, default_collate, 6, seed=1), steps=600)
    for step in range(600):
        for positions in POSITIONS:
            for index, first, last, kinds in loading.batch(step, positions).inputs.tolist():
                assert first == last == index
                assert kinds == 1
    data.file.close()


def test_data_that_only_the_rank_can_read_is_loaded_in_its_thread_and_noted_once(ahead, capsys):
    rank, forks = os.getpid(), []
    os.register_at_fork(after_in_parent=lambda: forks.append(1))

    def read(step, positions):
        if os.getpid() != rank:
            raise ConnectionError("nobody answers")
        return step, positions.start

    found = [each.inputs for each in all_of(ahead(Asked(read)))]
    assert found == [(step, each.start) for step in range(3) for each in POSITIONS]
    assert len(forks) == 2
    told = capsys.readouterr().out
    assert told.count("loaded in a thread; processes cannot: ConnectionError: nobody answers") == 1


class Row(NamedTuple):
    """A batch of a module that another process finds."""

    place: torch.Tensor


@pytest.mark.parametrize(
    "kind", ["named tuple", "list", "dataclass", "object", "not a leaf", "function"]
)
def test_batch_that_a_process_cannot_send_is_loaded_in_the_thread(ahead, capsys, kind):
    """As one of a class of a script, which runs as ``__main__`` where that is another module."""

    class Local(NamedTuple):
        place: torch.Tensor

    batches = {
        "named tuple": Local,
        "list": lambda place: {"x": type("Listed", (list,), {})([place])},
        "dataclass": make_dataclass("Batch", ["place"]),
        "object": lambda _: np.array([lambda: 0], dtype=object),
        "not a leaf": lambda place: 2.0 * place.requires_grad_(),
        "function": lambda place: lambda: place,
    }
    loading = ahead(Asked(lambda step, at: (step, at.start, batches[kind](torch.ones(1)))))
    found = [each.inputs[:2] for each in all_of(loading)]
    assert found == [(step, each.start) for step in range(3) for each in POSITIONS]
    assert capsys.readouterr().out.count("samples are loaded in a thread; processes cannot: ") == 1


def test_batch_of_a_class_that_processes_find_keeps_it(ahead):
    loading = ahead(Asked(lambda *_: (os.getpid(), Row(torch.ones(1)))))
    for pid, row in (each.inputs for each in all_of(loading)):
        assert (type(row), pid != os.getpid()) == (Row, True)


def test_large_parts_of_a_batch_are_not_pickled_twice():
    """What is passed over is not copied: a tensor's memory is shared."""
    told = io.BytesIO()
    parts = torch.zeros(10**6), np.zeros(10**6), {"more": np.zeros(10**6)}
    _Sent(told).dump(Samples(parts, None, torch.zeros(1)))
    assert len(told.getvalue()) < 1000


class Marked(torch.Tensor):
    """A subclass that other processes find."""


def test_the_trial_of_a_batch_leaves_no_shared_memory_behind():
    """A trial shares no memory, since no process would fetch it."""
    eye = torch.eye(3)
    parts = eye.to_sparse(), eye.as_subclass(Marked), torch.nn.Parameter(eye)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        _Sent(io.BytesIO()).dump(Samples(parts, None, torch.zeros(1)))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_processes_that_cannot_be_started_are_reported_with_the_cure(ahead, monkeypatch):
    def full():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(InputError, match=r"by 2 processes: Resource temporarily.+num_workers"):
        all_of(ahead(Asked(lambda *_: 0)))


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_when_others_take_over(ahead, tmp_path):
    def hang(step, _positions):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(3600 if step == 1 else 0)

    loading = ahead(Asked(hang))
    loading.batch(0, POSITIONS[0])
    before = {int(each.name) for each in tmp_path.iterdir()}
    loading.batch(2, POSITIONS[0])
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_process_is_reported_with_its_cure(ahead):
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
