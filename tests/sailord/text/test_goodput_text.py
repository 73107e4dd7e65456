"""What GPU time was spent on, as people read it."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.codec import plain
from sailord.api.answers.goodput import goodput_view
from sailord.goodput.core.ledger import Account, Ledger
from sailord.text.goodput_text import goodput_text

HOUR_US = 3_600_000_000
LEDGER = replace(
    Ledger(),
    since_us=0,
    until_us=10 * HOUR_US,
    accounts=(
        Account("training", 6 * HOUR_US, 12.0),
        Account("held", 2 * HOUR_US, 4.0),
        Account("lost", HOUR_US, 2.0),
        Account("step_under_way", HOUR_US, 2.0),
    ),
)


def test_what_was_not_training_is_one_sum_without_the_step_that_is_undecided() -> None:
    view = goodput_view(LEDGER)
    assert (view.not_training_gpu_s, view.not_training_usd) == (3 * 3600, 6.0)
    rows = [line.split() for line in goodput_text(plain(view)).splitlines()]
    assert ["not", "training", "30.0%", "3.00", "$6.00", "in", "all"] in rows
    assert ["all", "100.0%", "10.00", "$20.00"] in rows


def test_an_older_sailord_that_has_no_such_sum_is_read() -> None:
    found = plain(goodput_view(LEDGER))
    del found["not_training_gpu_s"], found["not_training_usd"]
    assert "not training" not in goodput_text(found)
