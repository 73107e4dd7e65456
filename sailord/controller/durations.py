"""Number and duration of decisions and reconfigurations since this process started."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import Histogram

from sailord.core.queries.reconfiguration_timing import START, ReconfigurationTiming

DECISION_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
MOVE_BUCKETS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets, registry=None)


@dataclass(eq=False)
class Durations:
    """Histograms and counters of the event loop."""

    decision: Histogram = field(
        default_factory=lambda: _histogram(
            "sailor_decision_seconds", "Duration of decisions.", DECISION_BUCKETS
        )
    )
    event_to_decision: Histogram = field(
        default_factory=lambda: _histogram(
            "sailor_event_to_decision_seconds", "Time from events to their decisions.",
            DECISION_BUCKETS,
        )
    )  # fmt: skip
    downtime: Histogram = field(
        default_factory=lambda: _histogram(
            "sailor_reconfiguration_downtime_seconds",
            "Time without training by reconfigurations, by their cause.", MOVE_BUCKETS, "kind",
        )
    )  # fmt: skip
    decisions: int = 0
    elections: int = 0
    """How often this process was elected."""
    steps_lost: int = 0

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """All histograms, for an exposition."""
        return self.decision, self.event_to_decision, self.downtime

    def decided(self, took_s: float, *, waited_s: float) -> None:
        """Count a decision; ``waited_s``: since its event, the decision included."""
        self.decisions += 1
        self.decision.observe(took_s)
        self.event_to_decision.observe(waited_s)

    def count_election(self, before: int | None, after: int | None) -> None:
        """Count a term that has begun."""
        self.elections += after is not None and after != before

    def moved(self, move: ReconfigurationTiming) -> None:
        """Count a reconfiguration that has ended; a start has no downtime."""
        self.steps_lost += move.steps_lost
        if move.kind != START:
            self.downtime.labels(move.kind).observe(move.downtime_s)
