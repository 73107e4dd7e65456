"""A simulated cluster whose links have a known delay and rate, and agents that may lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agents.protocol.link_records import SizeTimes
from sailord.network.core.choose import PastMeasurements, choose
from sailord.network.core.judge import Verdict, judge
from sailord.network.core.model import (
    Candidate,
    CurveToMeasure,
    Failure,
    Measurement,
    NetworkPolicy,
    NextMeasurement,
    Site,
)

NIC = 2e9
Lie = Callable[[Measurement], Measurement]


def site(letter: str) -> Site:
    return Site(f"zone-{letter}", "A100-40")


def nodes_of(sizes: dict[str, int], gpus: int = 1) -> list[Candidate]:
    return [
        Candidate(f"{letter}{number}", site(letter), gpus)
        for letter, count in sizes.items()
        for number in range(1, count + 1)
    ]


def measured(
    sender: str,
    receiver: str,
    *,
    at: float = 1.0,
    delay_s: float = 1e-3,
    rate: float = 1e9,
    sizes: tuple[int, ...] = (1 << 10, 1 << 20, 1 << 26),
    noise: Callable[[], float] = lambda: 1.0,
    question: CurveToMeasure | None = None,
) -> Measurement:
    """What an honest agent reports."""
    question = question or CurveToMeasure(site(sender[0]), site(receiver[0]))
    ways = question.flows
    times = tuple(
        SizeTimes(s, tuple((delay_s + ways * s / rate) * noise() for _ in range(3))) for s in sizes
    )
    moved = 4 * sum(sizes) * ways
    took_s = 4 * sum(times[-1].seconds)
    return Measurement(at, sender, receiver, question, 2 * delay_s, times, moved, took_s)


@dataclass(eq=False)
class SimulatedCluster:
    """Nodes, links, lies, and the profiler's knowledge; time passes as it measures."""

    nodes: list[Candidate]
    links: dict[tuple[str, str], tuple[float, float]]
    """Delay and rate by the letters of the zones."""
    policy: NetworkPolicy = field(
        default_factory=lambda: NetworkPolicy(seconds_per_hour=1e6, mbytes_per_hour=1e9)
    )
    seed: int = 1
    liars: dict[str, Lie] = field(default_factory=dict)
    down: set[tuple[str, str]] = field(default_factory=set)
    now: float = 1e6
    history: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    picks: list[NextMeasurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def verdict(self) -> Verdict:
        return judge(self.history, lambda _: NIC)

    @property
    def known(self) -> PastMeasurements:
        verdict = self.verdict
        flagged = [each.measurement for each in verdict.flagged]
        return PastMeasurements(verdict.good, self.failures, flagged, verdict.liars)

    def run(self, picks: int, since: float | None = None) -> int:
        """Make at most this many measurements; return how many were made."""
        for done in range(picks):
            pick = choose(self.nodes, self.known, self.policy, self.now, since=since)
            if pick is None:
                return done
            self._measure(pick)
        return picks

    def _measure(self, pick: NextMeasurement) -> None:
        self.picks.append(pick)
        self.now += 1.0
        ends = pick.sender[0], pick.receiver[0]
        if ends in self.down:
            why = "it stood still"
            failed = Failure(self.now, pick.sender, pick.receiver, pick.question, why, False, 1.0)
            self.failures.append(failed)
            return
        delay_s, rate = self.links[ends]
        found = measured(
            pick.sender,
            pick.receiver,
            at=self.now,
            delay_s=delay_s,
            rate=rate,
            sizes=pick.sizes_bytes,
            noise=lambda: self.random.lognormvariate(0.0, 0.1),
            question=pick.question,
        )
        lie = self.liars.get(pick.sender)
        self.history.append(found if lie is None else lie(found))


def times_as_long(factor: float) -> Lie:
    def lie(each: Measurement) -> Measurement:
        times = tuple(
            SizeTimes(t.size_bytes, tuple(s * factor for s in t.seconds)) for t in each.times
        )
        return replace(each, times=times, round_trip_s=each.round_trip_s * factor)

    return lie
