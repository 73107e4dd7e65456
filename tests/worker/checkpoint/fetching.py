"""Fetches pieces and collects them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.compatibility import model_of
from worker.checkpoint.fetch import FetchReport, fetch
from worker.checkpoint.piece_queue import PieceQueue
from worker.checkpoint.piece_sources import PieceBytes, PieceSource
from worker.checkpoint.placement import PieceKey, pieces_needed
from worker.checkpoint.snapshots.snapshot_manager import continue_from, load_piece
from worker.engines.interface import TrainingEngine


@dataclass(frozen=True, slots=True)
class Fetched:
    """All pieces, and where they came from."""

    report: FetchReport
    bodies: dict[PieceKey, PieceBytes]


def fetch_all(
    keys: Iterable[PieceKey] | Mapping[PieceKey, bool],
    groups: Sequence[Sequence[PieceSource]],
    **how: Any,
) -> Fetched:
    """Fetch pieces, with their moments unless told otherwise."""
    wanted = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, True)
    arrived = PieceQueue()
    report = fetch(wanted, groups, into=arrived, **how)
    return Fetched(report, dict(arrived.drain()))


def restore_from(trainer: TrainingEngine, sources: Sequence[PieceSource]) -> FetchReport:
    """Fill a trainer with the state that some sources have."""
    wanted = pieces_needed(trainer.holdings, trainer.rank, zero=trainer.job.zero)
    found = fetch_all(wanted, [sources], model=model_of(trainer.job))
    for key, body in found.bodies.items():
        load_piece(trainer, key, body)
    continue_from(trainer, found.report.header.progress)
    return found.report
