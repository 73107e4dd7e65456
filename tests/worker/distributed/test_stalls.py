"""Of ranks that wait, the one that holds up the others is named."""

from __future__ import annotations

import threading
import time
from random import Random

import torch
from torch._C._distributed_c10d import HashStore

from worker.distributed.process_groups import ProcessTransport
from worker.distributed.stalls import RankPosition, find_blame

MEMBERS = {"0-1-2": (0, 1, 2), "0 to 1": (0, 1), "1 to 0": (0, 1), "1-2": (1, 2)}


def at(waiting, what="x", **counts):
    names = {name.replace("_", "-").removeprefix("g"): count for name, count in counts.items()}
    return RankPosition(names, waiting, what)


def blamed(positions, *, queues=False):
    found = find_blame(0, positions, MEMBERS, queues=queues)
    return None if found is None else found.ranks


def test_rank_that_computes_is_blamed_through_those_that_wait_for_it():
    positions = {
        0: at(("0-1-2", 5), g0_1_2=5),
        1: at(("1-2", 3), g0_1_2=4, g1_2=3),
        2: at(None, "in data of step 7", g0_1_2=4, g1_2=2),
    }
    assert blamed(positions) == (2,)
    assert "in data of step 7" in find_blame(0, positions, MEMBERS, queues=False).text


def test_silent_rank_is_blamed_before_those_that_answer():
    positions = {0: at(("0-1-2", 5), g0_1_2=5), 1: at(("0-1-2", 5), g0_1_2=5)}
    assert blamed(positions) == (2,)


def test_ranks_that_wait_in_a_circle_are_reported_as_a_deadlock():
    positions = {
        0: RankPosition({"0 to 1": 0, "1 to 0": 1}, ("1 to 0", 1), "x"),
        1: RankPosition({"0 to 1": 1, "1 to 0": 0}, ("0 to 1", 1), "x"),
    }
    assert blamed(positions) == (0, 1)


def test_operation_that_all_have_started_is_blamed_on_the_link():
    positions = {rank: at(("0-1-2", 5), g0_1_2=5) for rank in range(3)}
    assert blamed(positions) == (0, 1, 2)
    assert blamed({**positions, 0: at(None)}) is None


def test_device_that_has_not_reached_an_operation_is_blamed():
    positions = {
        0: at(("0-1-2", 5), g0_1_2=5),
        1: at(("1-2", 3), g0_1_2=5, g1_2=3),
        2: at(None, g0_1_2=5, g1_2=2),
    }
    assert blamed(positions) == (0, 1, 2)
    assert blamed(positions, queues=True) == (2,)


def simulated(draw, ranks):
    """Random collectives in one order; one rank stops before one of them. Return all positions."""
    groups = [tuple(sorted(draw.sample(range(ranks), draw.randint(2, ranks)))) for _ in range(12)]
    culprit, at_number = draw.randrange(ranks), draw.randrange(4, 12)
    counts = [{} for _ in range(ranks)]
    waits = [None] * ranks
    stuck = set()
    for number, group in enumerate(groups):
        if number == at_number:
            stuck.add(culprit)
        here = [rank for rank in group if rank not in stuck]
        for rank in here:
            name = "-".join(map(str, group))
            counts[rank][name] = counts[rank].get(name, 0) + 1
        if len(here) < len(group):
            for rank in here:
                name = "-".join(map(str, group))
                waits[rank] = (name, counts[rank][name])
            stuck.update(here)
    members = {"-".join(map(str, group)): group for group in groups}
    found = {r: RankPosition(counts[r], waits[r], "x") for r in range(ranks)}
    return culprit, found, members


def test_culprit_of_random_hangs_is_named(examples):
    draw, right, judged = Random("stalls"), 0, 0
    for _ in range(max(200, examples)):
        culprit, positions, members = simulated(draw, draw.randint(2, 8))
        for rank, position in positions.items():
            if position.waiting is not None:
                judged += 1
                blame = find_blame(rank, positions, members, queues=False)
                right += blame is not None and blame.ranks == (culprit,)
    assert judged > 200
    assert right == judged


def test_hang_of_real_ranks_names_the_missing_one():
    store, told, release = HashStore(), [], threading.Event()

    def run(rank):
        transport = ProcessTransport(store, rank, 3, deadline_s=30.0)
        transport.activity = lambda: f"rank {rank} loads data"
        group = transport.group((0, 1, 2))
        group.all_reduce(torch.zeros(1))
        transport.stall_after_s = 0.2

        def note(blame):
            if not release.is_set():  # Later the others may be slow, too.
                told.append((rank, blame))
                release.set()

        transport.on_stall = note
        if rank == 2:
            assert release.wait(20)
        group.all_reduce(torch.zeros(1))
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told
    assert {blame.ranks for _, blame in told} == {(2,)}
    assert "rank 2 loads data" in told[0][1].text


def started(ranks, body):
    """Run ``body(rank, transport)`` for each rank in a thread; return the threads."""
    store = HashStore()

    def run(rank):
        transport = ProcessTransport(store, rank, ranks, deadline_s=30.0)
        transport.activity = lambda: f"rank {rank} loads data"
        body(rank, transport)
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    return threads


def test_rank_that_does_not_open_a_group_is_named():
    told, release = [], threading.Event()

    def run(rank, transport):
        transport.stall_after_s = 0.2
        transport.on_stall = lambda blame: (told.append(blame), release.set())
        if rank == 2:
            assert release.wait(20)
        if rank > 0:
            transport.group((1, 2))

    for thread in started(3, run):
        thread.join()
    assert [blame.ranks for blame in told] == [(2,)]
    assert told[0].text == "rank 2 has not arrived (rank 2 loads data)"


def test_wait_that_ended_while_the_others_were_asked_blames_nobody():
    """Its rank may wait for the next operation by then, for a moment."""
    told, ends, asked = [], threading.Event(), threading.Event()

    def run(rank, transport):
        group = transport.group((0, 1))
        if rank == 1:
            assert asked.wait(20)
            group.all_reduce(torch.zeros(1))
            assert ends.wait(20)
            group.all_reduce(torch.zeros(1))
            return
        transport.stall_after_s = 0.2
        transport.on_stall = told.append
        ask = transport._monitor.ask_positions

        def late(wait_s):
            answers = ask(wait_s)
            if not asked.is_set():
                asked.set()
                # The first three are the two halves of opening the group and the awaited sum.
                while (now := transport.operations.oldest()) is None or now[0].number < 4:
                    time.sleep(0.001)
                transport.stall_after_s = 60.0
            ends.set()
            return answers

        transport._monitor.ask_positions = late
        group.all_reduce(torch.zeros(1))
        group.all_reduce(torch.zeros(1))
        assert transport.stall is None

    for thread in started(2, run):
        thread.join()
    assert not told
