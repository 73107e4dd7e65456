"""The table at the head of ``sailord.core.model.standing`` is what the code does."""

from __future__ import annotations

from sailord.core.model import standing
from sailord.core.model.standing import (
    Absent,
    Lost,
    Present,
    Silent,
    Standing,
    Unreachable,
    given_up,
    lease_ended,
    lease_seen,
    probe_failed,
    reported,
)

EACH: tuple[Standing, ...] = (
    Present(),
    Unreachable(),
    Absent(1.0),
    Silent(1.0),
    Lost(2.0, "", None),
)
TRANSITIONS = {
    "lease_seen": lease_seen,
    "lease_ended": lambda each: lease_ended(each, 3.0),
    "probe_failed": probe_failed,
    "reported": reported,
    "given_up": lambda each: given_up(each, 3.0, "why"),
}


def test_the_table_of_transitions_matches_the_code():
    assert standing.__doc__ is not None
    rows = [line.split() for line in standing.__doc__.splitlines() if line.startswith("    ")]
    (_, *signals), *drawn = rows
    done = [
        [type(each).__name__, *(type(TRANSITIONS[name](each)).__name__ for name in signals)]
        for each in EACH
    ]
    assert set(signals) == set(TRANSITIONS)
    assert drawn == done


def test_a_lost_node_that_reports_is_back_with_or_without_its_lease():
    lost = given_up(Absent(1.0), 2.0, "silence")
    assert reported(lost) == Absent(1.0)
    assert reported(lease_seen(lost)) == Present()


def test_the_end_of_a_lease_is_remembered_from_the_first_time():
    assert lease_ended(lease_ended(Present(), 1.0), 2.0) == Absent(1.0)
    assert probe_failed(Absent(1.0)) == Silent(1.0)
    assert given_up(Silent(1.0), 2.0, "silence") == Lost(2.0, "silence", 1.0)


def test_an_agent_at_another_address_has_yet_to_be_probed():
    assert lease_seen(Unreachable()) == Unreachable()
    assert lease_seen(Unreachable(), has_moved=True) == Present()
