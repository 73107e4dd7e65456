"""All ranks of a group are there once each of them was counted."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from worker.distributed.presence import announce, are_all_there, pause_s


def test_all_are_there_once_the_last_one_is():
    store = HashStore()
    for there in range(3):
        assert not are_all_there(store, "group"), there
        announce(store, "group", 3)
    assert are_all_there(store, "group")
    assert not are_all_there(store, "another")


def test_a_large_group_asks_no_more_often_than_a_small_one():
    assert [1 / pause_s(size) for size in (1, 8)] == [1000, 1000]
    assert 512 / pause_s(512) == pytest.approx(8 / pause_s(8))
