"""What the check of plans shares with those who make them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulator.inputs.plan_check import split_in_proportion


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 500))
def test_total_is_split_in_proportion(weights: list[int], spare: int) -> None:
    total = len(weights) + spare
    shares = split_in_proportion(total, weights)
    assert sum(shares) == total
    assert all(share >= 1 for share in shares)
    assert split_in_proportion(sum(weights), weights) == weights
