"""Layer costs of a job whose ranks share tokens (sequence parallelism), from those without it.

Nothing is measured with it. So what is measured or computed without it is scaled by what the
model's counts and the roofline say with and without it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.arrays import Floats
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.roofline import LayerTimes
from simulator.models.layers import Recompute
from simulator.models.shared_tokens import with_shared_tokens
from simulator.spec.provenance import Provenance

_ERROR = 0.25
"""The error bar of measured times that are scaled."""


class SharedTokenCosts(LayerCosts):
    """The costs of TP degrees above 1 with shared tokens; those of TP 1 stay."""

    def __init__(self, without: LayerCosts) -> None:
        self._without = without
        self._counted = without.counted(without.job.model)
        self._shared = without.counted(with_shared_tokens(without.job.model))
        self._scaled: dict[tuple[str, int, int], LayerTimes] = {}
        super().__init__(
            without.job,
            profile=without.profile,
            catalogue=without._catalogue,
            network=without._network,
            hints=without.hints,
        )

    def times(self, gpu: str, *, tp: int, samples: int) -> LayerTimes:
        key = gpu, tp, samples
        if key not in self._scaled:
            self._scaled[key] = self._scale(*key)
        return self._scaled[key]

    def _scale(self, gpu: str, tp: int, samples: int) -> LayerTimes:
        plain = self._without.times(gpu, tp=tp, samples=samples)
        if tp == 1:
            return plain
        counted, shared = (
            costs.times(gpu, tp=tp, samples=samples) for costs in (self._counted, self._shared)
        )
        source = plain.provenance
        if source.source != "analytic":
            note = f"{gpu} TP {tp}: measured without sequence parallelism; scaled by the roofline"
            error = max(source.relative_error, _ERROR)
            source = Provenance("interpolated", error, (note, *source.notes))
        return replace(
            plain,
            forward=plain.forward * shared.forward / counted.forward,
            backward=plain.backward * shared.backward / counted.backward,
            provenance=source,
        )

    def kept_bytes(
        self, *, tp: int, samples: int, recompute: Recompute, gpu: str | None = None
    ) -> Floats:
        return self._scale_bytes("kept_bytes", tp, samples, recompute, gpu)

    def workspace_bytes(
        self, *, tp: int, samples: int, recompute: Recompute, gpu: str | None = None
    ) -> Floats:
        return self._scale_bytes("workspace_bytes", tp, samples, recompute, gpu)

    def _scale_bytes(
        self, what: str, tp: int, samples: int, recompute: Recompute, gpu: str | None
    ) -> Floats:
        found: list[Floats] = [
            getattr(costs, what)(tp=tp, samples=samples, recompute=recompute, gpu=gpu)
            for costs in (self._without, self._counted, self._shared)
        ]
        plain, counted, shared = found
        if tp == 1:
            return plain
        ratio = np.divide(shared, counted, out=np.ones_like(shared), where=counted > 0)
        scaled: Floats = plain * ratio
        return scaled
