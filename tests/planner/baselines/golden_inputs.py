"""The toy model and clusters that all golden results share, from the optional reference folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def load_golden(reference: Path, name: str) -> dict[str, Any]:
    """One golden file, or a skip where it is not there."""
    path = reference / "golden" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no golden results of {name}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Toy:
    """Rows of the common inputs, one number per layer."""

    raw: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        kinds: list[str] = self.raw["model"]["layer_kinds"]
        return kinds

    def forward_ms(self, gpu: str, *, tp: int, samples: int) -> list[float]:
        return self._times(gpu, tp, samples, "fwd_ms")

    def backward_ms(self, gpu: str, *, tp: int, samples: int) -> list[float]:
        return self._times(gpu, tp, samples, "bwd_ms")

    def _times(self, gpu: str, tp: int, samples: int, what: str) -> list[float]:
        table = self.raw["layer_times"][gpu]
        return [table[kind][str(tp)][str(samples)][what] for kind in self.kinds]

    def parameters(self, tp: int = 1) -> list[float]:
        return self._row("params_floats_per_layer", 1 / tp)

    def kept_bytes(self, *, tp: int = 1, samples: int = 1) -> list[float]:
        return self._row("act_saved_mb_per_sample_tp1", 2**20 * samples / tp)

    def output_floats(self) -> list[float]:
        return self._row("output_floats_per_sample", 1)

    def _row(self, key: str, factor: float) -> list[float]:
        table = self.raw["model"][key]
        return [table[kind] * factor for kind in self.kinds]


def load_toy(reference: Path) -> Toy:
    """The toy of the common inputs."""
    return Toy(load_golden(reference, "common_inputs"))
