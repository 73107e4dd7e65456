"""Packets arrive after their delay, no faster than their slowest link, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sailord.local.shaper import Path, Queue, Shaper

SIZE = 1000


def shaper(*, link: float | None = None, nic: float | None = None, delay_s: float = 0.0) -> Shaper:
    made = Shaper({("a", "b"): Path(Queue(link), delay_s)})
    for name in ("a1", "a2", "b1"):
        made.add_node(name, name[0], nic)
    return made


def test_packet_on_an_idle_link_takes_its_length_and_the_delay():
    assert shaper(link=1e6, nic=1e9, delay_s=0.01).arrival("a1", "b1", SIZE, 5.0) == (
        pytest.approx(5.0 + SIZE / 1e6 + 0.01)
    )


def test_zones_without_a_link_have_no_delay():
    assert shaper(link=1e6).arrival("b1", "a1", SIZE, 5.0) == 5.0


def test_senders_share_the_link_of_their_zones():
    made = shaper(link=1e6)
    first = made.arrival("a1", "b1", SIZE, 0.0)
    assert made.arrival("a2", "b1", SIZE, 0.0) == pytest.approx(2 * first)


def test_nic_of_the_receiver_limits_senders_of_two_zones():
    made = shaper(nic=1e6)
    made.arrival("a1", "b1", SIZE, 0.0)
    assert made.arrival("a2", "b1", SIZE, 0.0) == pytest.approx(2 * SIZE / 1e6)


def test_full_queue_drops_and_bytes_that_arrive_are_counted():
    made = shaper(link=1e6)
    arrived = sum(made.arrival("a1", "b1", SIZE, 0.0) is not None for _ in range(200))
    assert 50 <= arrived <= 51, "the queue holds 50 ms"
    assert made.bytes_sent == {("a1", "b1"): arrived * SIZE}


def test_link_that_is_down_carries_nothing():
    made = shaper()
    made.paths["a", "b"].is_down = True
    assert made.arrival("a1", "b1", SIZE, 0.0) is None


@given(st.lists(st.tuples(st.floats(0.0, 0.01), st.integers(40, 9000)), min_size=1))
def test_packets_arrive_in_order_within_the_rate(gaps):
    made, now, arrivals = shaper(link=1e6, nic=3e6, delay_s=0.02), 0.0, []
    for gap, size in gaps:
        now += gap
        at = made.arrival("a1", "b1", size, now)
        if at is not None:
            assert at >= now + size / 1e6 + 0.02 - 1e-9
            arrivals.append(at)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] >= made.bytes_sent["a1", "b1"] / 1e6 + 0.02 - 1e-9
