"""Nodes go where they are worth more, with the aim of replays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.records import JobId, NodeId
from planner.share.split_machines import Claim, PlanChoice, split_machines
from sailord.core.sharing.worth import GpusOfNode, Stake, best_handover, exchanges

ONE, TWO, THREE = map(JobId, ("one", "two", "three"))
KINDS: dict[NodeId, GpusOfNode] = {
    **{NodeId(f"a{number:02}"): ("A100-40", 1) for number in range(30)},
    **{NodeId(f"t{number:02}"): ("T4", 1) for number in range(10)},
}
A100S = [id_ for id_ in KINDS if id_.startswith("a")]
T4S = [id_ for id_ in KINDS if id_.startswith("t")]


def stakes(
    hands: Mapping[JobId, Sequence[NodeId]],
    *,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    t4: Sequence[float] = (0.2, 0.2, 0.2),
) -> dict[JobId, Stake]:
    """Jobs that train on these nodes, and what a T4 is worth to each."""
    return {
        id_: Stake(tuple(hands[id_]), weight, {"A100-40": 1.0, "T4": worth}, gives=True, gets=True)
        for id_, weight, worth in zip(hands, weights, t4, strict=False)
    }


def fairness(of: Mapping[JobId, Stake]) -> float:
    return sum(
        stake.weight * math.log(stake.worth(KINDS[node] for node in stake.nodes))
        for stake in of.values()
    )


def moved(of: Mapping[JobId, Stake], got: Mapping[JobId, tuple[NodeId, ...]]) -> dict[JobId, Stake]:
    gone = {node for nodes in got.values() for node in nodes}
    kept = {id_: tuple(n for n in stake.nodes if n not in gone) for id_, stake in of.items()}
    return {id_: replace(of[id_], nodes=(*kept[id_], *got.get(id_, ()))) for id_ in of}


SIZES = st.lists(st.integers(1, 6), min_size=2, max_size=3)
WEIGHTS = st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=3, max_size=3)


@given(SIZES, WEIGHTS)
def test_nodes_of_one_kind_are_split_as_replays_split_them(sizes, weights):
    names, nodes = (ONE, TWO, THREE)[: len(sizes)], iter(A100S)
    begun = stakes(
        {id_: [next(nodes) for _ in range(n)] for id_, n in zip(names, sizes, strict=True)},
        weights=weights,
    )
    ended = moved(begun, exchanges(begun, KINDS))
    choices = [PlanChoice(n, (n,), float(n)) for n in range(1, sum(sizes) + 1)]
    best = split_machines(
        [Claim(choices, weight) for _, weight in zip(sizes, weights, strict=False)], (sum(sizes),)
    )
    expected = sum(
        weight * math.log(each.worth) for weight, each in zip(weights, best, strict=False)
    )
    assert math.isclose(fairness(ended), expected, abs_tol=1e-9)


@given(SIZES, SIZES, WEIGHTS, st.lists(st.sampled_from((0.1, 0.3, 1.0)), min_size=3, max_size=3))
def test_each_handover_raises_the_sum_so_that_they_end(large, small, weights, t4):
    nodes, others = iter(A100S), iter(T4S)
    now = stakes(
        {
            id_: [*(next(nodes) for _ in range(n)), *(next(others) for _ in range(m % 4))]
            for id_, n, m in zip((ONE, TWO, THREE), large, small, strict=False)
        },
        weights=weights,
        t4=t4,
    )
    while (wanted := best_handover(now, KINDS)) is not None:
        then, now = now, moved(now, dict([wanted]))
        assert fairness(now) > fairness(then) + 0.005
        assert all(stake.nodes for stake in now.values())


def test_gpus_count_as_much_as_they_are_worth():
    """Two A100s and four T4s that are a fifth of them: each gets one, and two."""
    begun = stakes({ONE: [*T4S[:4], *A100S[:2]], TWO: ()})
    assert best_handover(begun, KINDS) == (TWO, (A100S[0], T4S[0], T4S[1]))


def test_nodes_go_to_the_job_to_which_they_are_worth_more():
    begun = stakes({ONE: T4S[:2], TWO: A100S[:2]}, t4=(0.1, 0.8))
    now, then = begun, None
    while now != then:
        wanted = best_handover(now, KINDS)
        now, then = now if wanted is None else moved(now, dict([wanted])), now
    assert set(now[ONE].nodes) == set(A100S[:2])
    assert set(now[TWO].nodes) == set(T4S[:2])


def test_a_job_gives_its_last_node_once_it_has_got_another():
    begun = stakes({ONE: T4S[:2], TWO: A100S[:2]}, t4=(0.1, 0.8))
    assert exchanges(begun, KINDS) == {ONE: tuple(A100S[:2]), TWO: tuple(T4S[:2])}
    assert best_handover(begun, KINDS) == (ONE, (A100S[0],))


def test_handovers_that_gain_less_than_a_move_costs_are_left_out():
    near = stakes({ONE: A100S[:11], TWO: A100S[11:20]})
    assert exchanges(near, KINDS) == {TWO: (A100S[0],)}
    assert best_handover(near, KINDS) is None
    assert best_handover(stakes({ONE: A100S[:6], TWO: A100S[6:10]}), KINDS) == (TWO, (A100S[0],))


def test_nodes_that_no_job_has_cost_nothing():
    without_job = {JobId(""): Stake((A100S[29],), 0.0, {}, gives=True, gets=False)}
    others = stakes({ONE: A100S[:20], TWO: A100S[20:29]})
    asleep = {id_: replace(stake, gives=False) for id_, stake in others.items()}
    assert best_handover(without_job | asleep, KINDS) == (TWO, (A100S[29],))
    alone = {ONE: replace(asleep[ONE], nodes=tuple(A100S[:29]))}
    assert best_handover(without_job | alone, KINDS) == (ONE, (A100S[29],))


def test_nodes_that_cannot_change_hands_now_count_and_one_to_train_on_is_kept():
    begun = stakes({ONE: A100S[:4], TWO: ()})
    assert best_handover(begun, KINDS) == (TWO, tuple(A100S[:2]))
    prepares = begun | {TWO: replace(begun[TWO], stays=tuple(A100S[4:7]))}
    assert best_handover(prepares, KINDS) is None
    waits = {ONE: replace(begun[ONE], nodes=(A100S[0],), stays=tuple(A100S[1:4])), TWO: begun[TWO]}
    assert best_handover(waits, KINDS) is None
