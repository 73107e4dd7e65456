"""The last line of the tour claims no more than what happened."""

from __future__ import annotations

import pytest

from sailord.local.tour.story import verdict


@pytest.mark.parametrize(
    ("is_whole", "steps_lost", "said"),
    [
        (True, 0, "nothing was lost"),
        (True, 1, "nothing was lost for good; 1 step repeated"),
        (True, 2, "nothing was lost for good; 2 steps repeated"),
        (False, 0, "something was LOST"),
    ],
)
def test_repeated_steps_are_reported(is_whole, steps_lost, said):
    assert verdict(is_whole=is_whole, steps_lost=steps_lost) == said
