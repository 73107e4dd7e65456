"""What GPU time was spent on, as people read it."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.codec import plain
from sailord.api.answers.goodput import goodput_view, usd_per_hour_of
from sailord.goodput.core.last_hour import EVERY_US, LastHour
from sailord.goodput.core.ledger import Account, CauseLoad, Ledger
from sailord.goodput.core.shares import Share
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


def test_sum_of_all_but_training_excludes_the_step_under_way() -> None:
    view = goodput_view(LEDGER)
    assert (view.not_training_gpu_s, view.not_training_usd) == (3 * 3600, 6.0)
    rows = [line.split() for line in goodput_text(plain(view)).splitlines()]
    assert ["not", "training", "30.0%", "3.00", "$6.00", "in", "all"] in rows
    assert ["all", "100.0%", "10.00", "$20.00"] in rows


def test_days_and_jobs_stand_below_and_the_rest_last() -> None:
    shares = [
        Share("day", "2026-05-02", 0, 10 * HOUR_US, (Account("training", 4 * HOUR_US, 8.0),)),
        Share("day", "2026-05-01", 0, 9 * HOUR_US, LEDGER.accounts[1:]),
        Share("job", "tale", 0, 10 * HOUR_US, LEDGER.accounts),
        Share("job", "", 0, 3 * HOUR_US),
    ]
    by_key = {each.key: each for each in shares}
    assert [each.name for each in goodput_view(LEDGER, by_key, most=1).days] == ["2026-05-02"]
    view = goodput_view(LEDGER, by_key)
    assert sum(each.gpu_s for each in view.days) == sum(each.gpu_s for each in view.causes)
    lines = [line.split() for line in goodput_text(plain(view)).splitlines()]
    days = lines.index(["day", "(UTC)", "goodput", "GPU", "h", "cost"])
    assert lines[days + 2 : days + 5] == [
        ["2026-05-02", "100.0%", "4.00", "$8.00"],
        ["2026-05-01", "0.0%", "4.00", "$8.00"],
        ["earlier", "100.0%", "2.00", "$4.00"],
    ]
    jobs = lines.index(["job", "goodput", "GPU", "h", "cost"])
    assert lines[jobs + 2 : -1] == [
        ["tale", "60.0%", "10.00", "$20.00"],
        ["no", "job", "-", "0.00", "$0.00"],
    ]
    assert goodput_text(plain(view)).endswith(
        "\na job's cost is that of all nodes while it had the cluster; `status` counts those of "
        "its plan only"
    )


def test_the_last_minutes_and_the_last_hour_are_told_with_their_largest_waste() -> None:
    hour = LastHour()
    for minute in range(0, 200):
        us = minute * EVERY_US
        held = min(minute, 189)  # Not in the last ten minutes.
        booked = (
            Account("training", 3 * us, 6.0 * minute),
            Account("held", held * EVERY_US, 2.0 * held),
        )
        ledger = replace(LEDGER, until_us=us, accounts=(*booked, Account("lost", HOUR_US, 2.0)))
        hour.note(ledger)
    view = goodput_view(ledger, last_hour=hour)
    assert view.last_hour is not None
    assert goodput_text(plain(view)).splitlines()[1:3] == [
        "last 10 min: goodput 100.0%, $60.00; $0.00 of that not training",
        "last 60 min: goodput 78.3%, $460.00; $100.00 of that not training, most of it "
        "waiting for an order ($100.00)",
    ]
    assert "last 10 min" not in goodput_text(
        plain(view) | {"last_minutes": plain(view)["last_hour"]}
    )
    hour.clear()
    hour.note(ledger)
    assert goodput_view(ledger, last_hour=hour).last_hour is None, "nothing was booked since"
    assert "last 60" not in goodput_text(plain(goodput_view(ledger)))


def test_the_price_of_all_nodes_counts_rented_and_unused_ones() -> None:
    loads = CauseLoad("training", 4, 4.8), CauseLoad("unused", 4, 1.0, 5.0)
    assert usd_per_hour_of(replace(LEDGER, loads=loads)) == 10.8
    unpriced = replace(loads[1], unpriced_gpus=1)
    assert usd_per_hour_of(replace(LEDGER, loads=(loads[0], unpriced))) is None
    assert usd_per_hour_of(LEDGER) is None
