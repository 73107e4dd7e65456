"""Samples loaded ahead: the order, what is raised and when, and what ends with its rank."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from worker.data.batch import Samples
from worker.data.datasets.map_dataset import MapData, default_collate
from worker.data.read_ahead import AHEAD, ReadAhead

POSITIONS = (range(2), range(2, 4), range(4, 6))


class Noting:
    """Notes what is loaded, by which thread; may fail at a place or wait to be let on."""

    def __init__(self, *, bad=None) -> None:
        self.loaded, self.threads, self.bad = [], set(), bad
        self.noted = threading.Condition()

    def batch(self, step, positions):
        with self.noted:
            self.loaded.append((step, positions))
            self.threads.add(threading.current_thread())
            self.noted.notify_all()
        if (step, positions) == self.bad:
            raise KeyError(step)
        return Samples((step, positions), None, torch.zeros(1))

    def wait_for(self, count):
        with self.noted:
            assert self.noted.wait_for(lambda: len(self.loaded) >= count, timeout=60)


def nothing_lost():
    """All ranks are there."""


def places(steps):
    return [(step, positions) for step in steps for positions in POSITIONS]


def test_micro_batches_are_loaded_in_order_up_to_the_last_step():
    source = Noting()
    ahead = ReadAhead(source, POSITIONS, steps=3, check=nothing_lost)
    for step, positions in places(range(3)):
        assert ahead.batch(step, positions).inputs == (step, positions)
    ahead.close()
    assert source.loaded == places(range(3)), "each once"


def test_two_micro_batches_are_loaded_before_they_are_asked_for():
    source = Noting()
    ahead = ReadAhead(source, POSITIONS, steps=None, check=nothing_lost)
    ahead.batch(0, POSITIONS[0])
    source.wait_for(1 + AHEAD)
    ahead.close()
    assert source.loaded == places(range(1))[: 1 + AHEAD], "and no more"
    assert threading.current_thread() not in source.threads


def test_a_repeated_step_is_loaded_again():
    source = Noting()
    ahead = ReadAhead(source, POSITIONS, steps=None, check=nothing_lost)
    for step, positions in [*places(range(2)), *places(range(1, 3))]:
        assert ahead.batch(step, positions).inputs == (step, positions)
    ahead.close()


def test_an_error_is_raised_for_its_own_micro_batch():
    source = Noting(bad=(0, POSITIONS[2]))
    ahead = ReadAhead(source, POSITIONS, steps=None, check=nothing_lost)
    ahead.batch(0, POSITIONS[0])
    source.wait_for(3)
    assert ahead.batch(0, POSITIONS[1]).inputs == (0, POSITIONS[1]), "the fault is not yet due"
    for _ in range(2):
        with pytest.raises(KeyError):
            ahead.batch(0, POSITIONS[2])
    ahead.close()
    assert source.loaded == [*places(range(1)), (0, POSITIONS[2])], "nothing is read behind it"


def test_the_thread_ends_when_its_owner_is_deleted():
    source = Noting()
    ahead = ReadAhead(source, POSITIONS, steps=None, check=nothing_lost)
    ahead.batch(0, POSITIONS[0])
    (thread,) = source.threads
    del ahead
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_deleting_a_reader_does_not_wait_for_its_load_under_way():
    """The garbage collector may drop it while its caller has a lock that the thread waits for."""
    may_go_on = threading.Event()

    class Slow(Noting):
        def batch(self, step, positions):
            found = super().batch(step, positions)
            if positions != POSITIONS[0]:
                assert may_go_on.wait(timeout=60)
            return found

    source = Slow()
    ahead = ReadAhead(source, POSITIONS, steps=None, check=nothing_lost)
    ahead.batch(0, POSITIONS[0])
    source.wait_for(2)
    (thread,) = source.threads
    del ahead
    gc.collect()
    assert thread.is_alive()
    may_go_on.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(source.loaded) == 2


def test_a_rank_that_waits_for_samples_notices_a_loss():
    """Slow storage may keep it for minutes, and its last steps count if it saves them in time."""
    may_go_on, lost = threading.Event(), threading.Event()

    class Slow(Noting):
        def batch(self, step, positions):
            found = super().batch(step, positions)
            lost.set()
            assert may_go_on.wait(timeout=60)
            return found

    def check():
        if lost.is_set():
            raise ConnectionError("rank 3 is lost")

    ahead = ReadAhead(Slow(), POSITIONS, steps=None, check=check)
    with pytest.raises(ConnectionError, match="rank 3"):
        ahead.batch(0, POSITIONS[0])
    may_go_on.set()
    ahead.close()


def test_random_numbers_drawn_elsewhere_do_not_affect_a_sample():
    class Drawing:
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return torch.tensor([random.random(), torch.rand(1).item()])

    def data():
        return MapData(Drawing(), default_collate, 6, 0)

    wanted = [data().batch(*place).inputs for place in places(range(4))]
    random.seed(5)
    torch.manual_seed(5)
    apart = random.random(), torch.rand(1).item()
    random.seed(5)
    torch.manual_seed(5)
    ahead = ReadAhead(data(), POSITIONS, steps=4, check=nothing_lost)
    found = [ahead.batch(*place).inputs for place in places(range(4))]
    ahead.close()
    assert all(map(torch.equal, found, wanted))
    assert (random.random(), torch.rand(1).item()) == apart, "nor the other way round"
