"""Machines are split by proportional fairness: as brute force does, and as a person expects."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from planner.share.split_machines import (
    Claim,
    PlanChoice,
    split_machines,
    without_dominated,
)


def scaling(most: int, power: float = 0.8) -> list[PlanChoice]:
    """Plans on 1 to ``most`` machines of one pool, each a little less worth per machine."""
    return [PlanChoice(n, (n,), n**power) for n in range(1, most + 1)]


def machines_of(split: tuple[PlanChoice | None, ...]) -> list[int]:
    return [0 if choice is None else sum(choice.machines) for choice in split]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Claim], tuple[int, ...]]:
    pools = draw(st.integers(1, 3))
    machines = tuple(draw(st.integers(0, 5)) for _ in range(pools))
    claims = []
    for _ in range(draw(st.integers(1, 4))):
        taken = st.tuples(*[st.integers(0, 4)] * pools).filter(any)
        choices = [
            PlanChoice(number, draw(taken), draw(st.floats(0.1, 100)))
            for number in range(draw(st.integers(0, 5)))
        ]
        running = draw(st.sampled_from([None, *choices]))
        weight = draw(st.sampled_from([0.5, 1.0, 3.0]))
        claims.append(Claim(choices, weight, running, draw(st.sampled_from([0.0, 0.1, 0.9]))))
    return claims, machines


def rank_of(
    claims: list[Claim], picks: tuple[PlanChoice | None, ...], machines: tuple[int, ...]
) -> tuple[float, float]:
    running = value = 0.0
    for claim, pick in zip(claims, picks, strict=True):
        if pick is None:
            continue
        alone = max(each.worth for each in claim.choices if fits((each,), machines))
        worth = pick.worth / alone
        if claim.running not in (None, pick):
            worth *= max(1e-3, 1 - claim.move_share)
        running += claim.weight
        value += claim.weight * math.log(worth)
    return running, value


def fits(picks: tuple[PlanChoice | None, ...], machines: tuple[int, ...]) -> bool:
    taken = [pick.machines for pick in picks if pick is not None]
    return all(sum(each[pool] for each in taken) <= up for pool, up in enumerate(machines))


@given(cases())
def test_no_other_split_is_better(case: tuple[list[Claim], tuple[int, ...]]) -> None:
    claims, machines = case
    found = split_machines(claims, machines)
    assert fits(found, machines)
    best = max(
        rank_of(claims, picks, machines)
        for picks in product(*([None, *claim.choices] for claim in claims))
        if fits(picks, machines)
    )
    running, value = rank_of(claims, found, machines)
    assert running == best[0]
    assert math.isclose(value, best[1], abs_tol=1e-6)


@given(cases())
def test_dominated_choices_change_nothing(case: tuple[list[Claim], tuple[int, ...]]) -> None:
    claims, machines = case
    plain = [Claim(claim.choices, claim.weight) for claim in claims]
    fewer = [Claim(without_dominated(claim.choices), claim.weight) for claim in claims]
    full, front = (split_machines(each, machines) for each in (plain, fewer))
    one, two = rank_of(plain, full, machines), rank_of(plain, front, machines)
    assert one[0] == two[0]
    assert math.isclose(one[1], two[1], abs_tol=1e-6)


def test_equal_jobs_get_equal_parts_and_weights_count() -> None:
    equal = [Claim(scaling(12)) for _ in range(3)]
    assert machines_of(split_machines(equal, (12,))) == [4, 4, 4]
    weighted = [Claim(scaling(12), 2.0), Claim(scaling(12)), Claim(scaling(12))]
    assert machines_of(split_machines(weighted, (12,))) == [6, 3, 3]


def test_a_job_that_scales_no_further_leaves_machines_to_the_other() -> None:
    flat = [*scaling(3), *(PlanChoice(n, (n,), 3**0.8) for n in range(4, 9))]
    assert machines_of(split_machines([Claim(flat), Claim(scaling(8))], (8,))) == [3, 5]


def test_the_unit_of_worth_does_not_matter() -> None:
    small = [PlanChoice(each.plan, each.machines, each.worth / 1000) for each in scaling(8)]
    assert machines_of(split_machines([Claim(small), Claim(scaling(8))], (8,))) == [4, 4]


def test_the_split_runs_as_much_weight_as_possible() -> None:
    large = Claim([PlanChoice(0, (4,), 100.0)])
    # Either of two equal jobs could run: the earlier one does.
    assert machines_of(split_machines([large, Claim(scaling(4))], (4,))) == [4, 0]
    assert machines_of(split_machines([Claim(scaling(4)), large], (4,))) == [4, 0]
    assert machines_of(split_machines([large, Claim(scaling(4))], (5,))) == [4, 1]
    heavy = Claim(large.choices, weight=3.0)
    assert machines_of(split_machines([Claim(scaling(4)), heavy], (4,))) == [0, 4]


def test_a_job_keeps_what_it_runs_unless_a_change_is_worth_the_move() -> None:
    plans = scaling(8)
    before = [Claim(plans, running=plans[2], move_share=0.5), Claim(plans, running=plans[4])]
    assert machines_of(split_machines(before, (8,))) == [3, 5]
    cheap = [Claim(plans, running=plans[2], move_share=1e-4), Claim(plans, running=plans[4])]
    assert machines_of(split_machines(cheap, (8,))) == [4, 4]


def test_a_limit_on_remembered_splits_still_gives_one_that_fits() -> None:
    found = split_machines([Claim(scaling(12)) for _ in range(3)], (12,), splits_max=3)
    assert 0 < sum(machines_of(found)) <= 12
