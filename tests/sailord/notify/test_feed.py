"""Events keep their order for followers, also under a leader whose clock is behind."""

from __future__ import annotations

from sailord.notify.feed import Feed, FeedEvent


def test_a_follower_of_a_leader_whose_clock_was_ahead_misses_nothing() -> None:
    feed = Feed()
    feed.restore([FeedEvent(1_000, 1.0, "transition", "an old line")])
    feed.add(FeedEvent(feed.next_id(0.001_005), 0.001_005, "job_held", "it is held"))
    ahead = 1_020
    assert [event.text for event in feed.after(ahead)] == ["it is held"]
    last = feed.kept[-1].id
    assert feed.after(last) == []
    assert [event.text for event in feed.after(999)] == ["an old line", "it is held"]
