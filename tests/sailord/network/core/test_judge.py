"""Absurd measurements are set aside, whoever reports them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.link_records import SizeTimes
from sailord.network.core.judge import judge
from tests.sailord.network.core.clusters import NIC, measured, times_as_long


def why_not(measurements):
    verdict = judge(measurements, lambda _: NIC)
    return {f.measurement.sender: f.why for f in verdict.flagged}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"round_trip_s": 0.0}, "a round trip of 0 s"),
        ({"round_trip_s": -1.0}, "a round trip of -1 s"),
        ({"round_trip_s": 1e9}, "a round trip of 1e+09 s"),
        ({"times": (SizeTimes(1 << 20, (-0.5, -0.5)),)}, "1048576 bytes in no time"),
        ({"times": (SizeTimes(1 << 20, (1e300,)),)}, "1048576 bytes in 1e+300 s"),
        ({"times": (SizeTimes(1 << 20, (5e-324,)),)}, "1048576 bytes in no time"),
        ({"times": (SizeTimes(1 << 20, ()),)}, "1048576 bytes in no time"),
        ({"times": (SizeTimes(1 << 26, (1e-6,)),)}, "6.71e+04 GB/s over a NIC of 2 GB/s"),
        ({"times": (SizeTimes(12345, (1.0,)),)}, "sizes that were not asked for"),
        (
            {"times": (SizeTimes(1 << 20, (9.0,)), SizeTimes(1 << 22, (1.0,)))},
            "4194304 bytes much faster than fewer",
        ),
    ],
)
def test_impossible_measurements_are_flagged(changes, why):
    assert why_not([replace(measured("a1", "b1"), **changes)]) == {"a1": why}


def test_one_node_against_two_is_flagged_and_they_are_not():
    honest = [measured("a1", "b1"), measured("a2", "b1")]
    found = why_not([*honest, times_as_long(50.0)(measured("a3", "b1"))])
    assert found == {"a3": "50 times off what other nodes report"}


def test_of_two_that_contradict_each_other_neither_is_used_nor_blamed():
    pair = [measured("a1", "b1", at=n) for n in (1, 2)]
    pair += [times_as_long(50.0)(measured("a2", "b1", at=n)) for n in (1, 2)]
    verdict = judge(pair, lambda _: NIC)
    assert verdict.good == ()
    assert len(verdict.flagged) == 4
    assert verdict.liars == frozenset()


def test_round_trip_is_the_same_from_both_ends():
    lie = replace(measured("b1", "a1"), round_trip_s=0.5)
    found = why_not([measured("a1", "b1"), measured("a2", "b1"), lie])
    assert found == {"b1": "250 times off what other nodes report"}


def test_nothing_of_a_node_is_used_if_most_of_it_is_absurd():
    fast = [times_as_long(1e-6)(measured("a1", "b1", at=n)) for n in (1, 2)]
    verdict = judge([*fast, measured("a1", "c1", at=3)], lambda _: NIC)
    assert verdict.good == ()
    assert verdict.liars == {"a1"}


def test_slow_links_between_other_sites_are_no_contradiction():
    assert why_not([measured("a1", "b1"), measured("a2", "c1", delay_s=0.2, rate=1e6)]) == {}


def test_busy_processors_are_no_lie():
    """On a loaded machine whole series of short transfers wait for a core."""
    idle = [measured(node, "b1", delay_s=2e-5) for node in ("a1", "a2")]
    late = SizeTimes(1 << 10, (0.009, 0.02, 0.05)), *idle[0].times[1:]
    busy = [replace(measured("a3", "b1", delay_s=2e-5, at=n), times=late) for n in (1, 2, 3)]
    assert judge([*idle, *busy], lambda _: NIC).flagged == ()
