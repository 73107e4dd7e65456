"""A profile: measured times and sizes of a model's layers on real GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from simulator.arrays import Floats
from simulator.documents.problems import Problems
from simulator.models.layers import Precision


def profile_name(model: str) -> str:
    """Return the name that the profile of a model gets, unless another is given."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model"


Collectives = Literal["inside", "apart"]


@dataclass(frozen=True, slots=True)
class TimingMeasurement:
    """How ``sailorctl profile model`` measured a timing, and how sure it is."""

    device: str
    driver: str
    torch: str
    date: str
    samples: int
    spread: float
    """Half of the interquartile range of a round's total, relative to its median; more where the
    host sets the pace, in which machines of one kind differ."""
    forward_spread: tuple[float, ...] = ()
    backward_spread: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per layer for one micro batch, on ``tp`` GPUs of one kind in one machine."""

    forward_s: Floats
    backward_s: Floats
    optimizer_s: float | None
    """The optimizer step over ``Profile.optimizer_parameters[tp]`` parameters, if measured."""
    notes: tuple[str, ...] = ()
    kept_bytes: Floats | None = None
    """What each layer holds from its forward to its backward pass, its input included."""
    transient_bytes: Floats | None = None
    """What each layer takes beyond that while one of its passes runs."""
    collectives: Collectives = "inside"
    """Whether the seconds include the TP all-reduces."""
    measurement: TimingMeasurement | None = None

    @property
    def relative_error(self) -> float:
        """The error bar that the measurement itself states; 0 if it states none."""
        return 0.0 if self.measurement is None else self.measurement.spread


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Element counts per layer and TP rank, for one sample."""

    parameters: tuple[int, ...]
    output_elements: tuple[int, ...]
    kept_elements: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measured times and sizes of a model with the layers embedding, blocks and head."""

    name: str
    sequence: int
    precision: Precision
    layer_names: tuple[str, ...]
    timings: Mapping[tuple[str, int, int], Timing]
    """By (GPU kind, TP degree, micro batch)."""
    sizes: Mapping[int, LayerSizes]
    """By TP degree."""
    optimizer_parameters: Mapping[int, int]
    """Parameters per TP rank of the model whose optimizer step was timed, by TP degree."""
    config: Mapping[str, Any]
    flash_attention: bool = False
    fingerprint: str = ""
    """Hash of the model that was measured; empty: not known."""
    did_not_fit: frozenset[tuple[str, int, int]] = field(default_factory=frozenset)
    """The (GPU kind, TP degree, micro batch) combinations for which memory was too small."""

    @property
    def is_own(self) -> bool:
        """Whether Sailor measured all of it: without hooks, and with the model's own counts."""
        return all(timing.measurement is not None for timing in self.timings.values())

    def is_of_another(self, fingerprint: str) -> bool:
        """Whether another model than that of a fingerprint was measured, as far as is known."""
        return "" not in (self.fingerprint, fingerprint) and self.fingerprint != fingerprint

    def micro_batches(self, gpu: str, tp: int) -> list[int]:
        """Return the micro batch sizes measured on this GPU kind at this TP degree."""
        return sorted(b for kind, degree, b in self.timings if (kind, degree) == (gpu, tp))

    def degrees(self, gpu: str) -> list[int]:
        """Return the TP degrees measured on this GPU kind."""
        return sorted({degree for kind, degree, _ in self.timings if kind == gpu})

    def gpus(self) -> list[str]:
        return sorted({kind for kind, _, _ in self.timings})

    def measured_bytes(
        self,
        what: Literal["kept_bytes", "transient_bytes"],
        *,
        gpus: Iterable[str],
        tp: int,
        samples: int,
    ) -> Floats | None:
        """Return the bytes of each layer, the most of these GPU kinds; ``None``: not measured.

        Between measured micro batches, and beyond the last two, they lie on a line.
        """
        found = []
        for gpu in gpus:
            entries = [(b, self.timings[gpu, tp, b]) for b in self.micro_batches(gpu, tp)]
            rows = [(b, row) for b, each in entries if (row := getattr(each, what)) is not None]
            if rows:
                found.append(_on_line(rows, samples))
        return np.max(found, axis=0) if found else None

    def merged_with(self, newer: Profile, *, place: str) -> Profile:
        """Merge two profiles, newer measurements first; ``InputError`` unless of one model."""
        problems = Problems()
        for what, mine, theirs in (
            ("sequence", self.sequence, newer.sequence),
            ("precision", self.precision, newer.precision),
            ("flash_attention", self.flash_attention, newer.flash_attention),
        ):
            if mine != theirs:
                said = f"was measured with {what} {mine}, and the job has {theirs}"
                problems.add(place, said, "give another --name, or remove the file")
        if self.layer_names != newer.layer_names:
            said = "was measured on other layers than the job's"
            problems.add(place, said, "give another --name, or remove the file")
        elif self.is_of_another(newer.fingerprint):
            said = "was measured on another model than the job's, or counted by another version"
            problems.add(place, said, "give another --name, or remove the file")
        if not self.is_own:
            problems.add(place, "was not measured by sailorctl profile", "give another --name")
        problems.raise_if_any()
        timings = {**self.timings, **newer.timings}
        return replace(
            newer,
            timings=timings,
            sizes={**self.sizes, **newer.sizes},
            optimizer_parameters={**self.optimizer_parameters, **newer.optimizer_parameters},
            did_not_fit=(self.did_not_fit | newer.did_not_fit) - timings.keys(),
        )


def _on_line(rows: list[tuple[int, Floats]], samples: int) -> Floats:
    """Interpolate between micro batches, which grow."""
    if len(rows) == 1:
        only, row = rows[0]
        scaled: Floats = row * (samples / only)
        return scaled
    right = next((i for i, (b, _) in enumerate(rows) if b >= samples and i > 0), len(rows) - 1)
    (low, below), (high, above) = rows[right - 1], rows[right]
    line: Floats = below + (above - below) * ((samples - low) / (high - low))
    return np.maximum(line, 0.0)
