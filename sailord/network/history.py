"""The history of measurements, a file of one JSON line each."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agents.protocol.codec import WireError, decode, encode
from sailord.network.core.model import CurveToMeasure, Measurement
from worker.atomic_file import replace_file

log = structlog.get_logger("sailord")

KEPT = 20
"""Measurements kept of each question, the newest ones."""


@dataclass(eq=False)
class MeasurementHistory:
    """All measurements that are kept, oldest first."""

    path: Path
    by_question: dict[CurveToMeasure, deque[Measurement]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT))
    )

    @property
    def all(self) -> list[Measurement]:
        """Return all measurements by question, oldest first."""
        return [each for found in self.by_question.values() for each in found]

    def load(self) -> None:
        """Read the file, and shorten it to what is kept; unreadable lines are skipped."""
        if not self.path.exists():
            return
        skipped = 0
        for line in self.path.read_bytes().splitlines():
            try:
                each = decode(Measurement, line)
            except WireError:
                skipped += 1
            else:
                self.by_question[each.question].append(each)
        if skipped:
            log.warning("unreadable lines in the network's history", skipped=skipped)
        lines = (encode(each) + b"\n" for each in sorted(self.all, key=lambda each: each.at))
        replace_file(self.path, b"".join(lines))

    def add(self, measurement: Measurement) -> None:
        """Add a measurement, to the file too."""
        self.by_question[measurement.question].append(measurement)
        with self.path.open("ab") as file:
            file.write(encode(measurement) + b"\n")
