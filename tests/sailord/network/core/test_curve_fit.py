"""Curves never fall, ignore single bad values, and keep their band around them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.link_records import SizeTimes
from sailord.network.core.curve_fit import fit_curves, isotonic
from sailord.network.core.model import SIZES_BYTES, Measurement
from sailord.network.network_document import network_document
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network_file import network_from_json
from tests.sailord.network.core.clusters import measured, site

positive = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(positive, st.floats(0.1, 10.0)), min_size=1))
def test_rising_never_falls_and_keeps_the_weighted_sum(pairs):
    values, weights = zip(*pairs, strict=True)
    found = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    total = sum(v * w for v, w in pairs)
    assert sum(v * w for v, w in zip(found, weights, strict=True)) == pytest.approx(total)
    if list(values) == sorted(values):
        assert found == pytest.approx(list(values))


@given(st.lists(st.lists(positive, min_size=1, max_size=5), min_size=1, max_size=9))
def test_any_times_give_a_whole_curve_that_never_falls_within_its_band(rows):
    times = tuple(SizeTimes(s, tuple(row)) for s, row in zip(SIZES_BYTES, rows, strict=False))
    base = measured("a1", "b1")
    (curve,) = fit_curves([Measurement(1.0, "a1", "b1", base.question, 1e-3, times, 1, 1.0)])
    assert [point.size_bytes for point in curve.points] == list(SIZES_BYTES)
    assert all(a.seconds <= b.seconds for a, b in pairwise(curve.points))
    assert all(p.low_s <= p.seconds * 1.000001 for p in curve.points)
    assert all(p.high_s >= p.seconds * 0.999999 for p in curve.points)
    assert curve.bytes_per_s > 0


def test_one_bad_pair_of_three_changes_nothing():
    good = [measured("a1", "b1"), measured("a2", "b1")]
    (alone,) = fit_curves(good)
    (with_bad,) = fit_curves([*good, measured("a3", "b1", rate=2e8)])
    assert [p.seconds for p in with_bad.points] == pytest.approx([p.seconds for p in alone.points])
    assert with_bad.node_pairs == 3


def test_rate_and_delay_are_found_and_larger_sizes_follow_the_rate():
    (curve,) = fit_curves([measured("a1", "b1", delay_s=0.01, rate=2e7, sizes=SIZES_BYTES[:6])])
    assert curve.bytes_per_s == pytest.approx(2e7)
    assert curve.round_trip_s == pytest.approx(0.02)
    assert [point.is_measured for point in curve.points] == [True] * 6 + [False] * 3
    assert curve.points[-1].seconds == pytest.approx(0.01 + SIZES_BYTES[-1] / 2e7)


def test_simulator_reads_the_file_and_computes_the_same_times():
    (curve,) = curves = fit_curves([measured("a1", "b1", sizes=SIZES_BYTES)])
    network = network_from_json(
        network_document(curves), place="network.json", catalogue=load_catalogue(None)
    )
    ends = tuple((s.zone, s.gpu) for s in (site("a"), site("b")))
    read = network.between[ends][1]
    assert [read(size) for size in SIZES_BYTES] == pytest.approx(
        [p.seconds for p in curve.points], rel=1e-4
    )
    # They are of TCP connections, and nine of ten transfers lie in a band.
    assert read.is_tcp
    spread = sorted(max(p.high_s / p.seconds, p.seconds / p.low_s) - 1 for p in curve.points)
    assert read.relative_error == pytest.approx(spread[len(spread) // 2], abs=1e-3)
