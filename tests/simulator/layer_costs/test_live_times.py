"""The steps of a running job correct its profile, by GPU kind and layers."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.layer_costs.live_times import (
    STEP,
    Correction,
    corrected,
    corrections_of,
    factors_of,
)
from simulator.layer_costs.roofline import LayerTimes
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED


def stage(first: int, end: int, gpu: str, tp: int = 1) -> Stage:
    return Stage((first, end), tp, (Place(gpu, "machine", "zone"),))


# Ranks 0 and 1 are the first stage, 2 the second, 3 the second pipeline.
PLAN = Plan(
    1,
    (
        Pipeline(4, (stage(0, 2, "A", tp=2), stage(2, 4, "B"))),
        Pipeline(4, (stage(0, 4, "B"),)),
    ),
)
TWICE = STEP ** round(np.log(2) / np.log(STEP))


def test_each_kind_and_range_gets_the_median_of_its_ranks() -> None:
    found = corrections_of(PLAN, {0: 1.9, 1: 2.1, 2: 1.0, 3: 0.5}, relative_error=0.1)
    assert found == (
        Correction("A", 0, 2, pytest.approx(TWICE)),
        Correction("B", 0, 4, pytest.approx(1 / TWICE)),
        Correction("B", 2, 4, 1.0),
    )
    assert abs(found[0].factor / 2 - 1) < STEP - 1


def test_ratio_of_a_rank_counts_for_the_layers_of_all_its_chunks() -> None:
    cuts = (stage(0, 1, "A", tp=2), stage(1, 2, "B"), stage(2, 3, "A", tp=2), stage(3, 4, "B"))
    plan = Plan(1, (Pipeline(4, cuts), Pipeline(4, cuts)), "interleaved", 2)
    ratios = {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 2.0}
    assert corrections_of(plan, ratios, relative_error=0.1) == (
        Correction("A", 0, 1, 1.0),
        Correction("A", 2, 3, 1.0),
        Correction("B", 1, 2, pytest.approx(TWICE)),
        Correction("B", 3, 4, pytest.approx(TWICE)),
    )


def test_nothing_is_corrected_within_the_error_bar() -> None:
    ratios = dict.fromkeys(range(4), 1.09)
    assert corrections_of(PLAN, ratios, relative_error=0.1) == ()
    assert corrections_of(PLAN, {}, relative_error=0.1) == ()
    assert corrections_of(PLAN, ratios | {2: 1.2}, relative_error=0.1) != ()


def test_noise_does_not_change_a_correction() -> None:
    one, other = (
        corrections_of(PLAN, dict.fromkeys(range(4), ratio), relative_error=0.1)
        for ratio in (1.5, 1.51)
    )
    assert one == other


def test_layers_without_a_measurement_get_that_of_their_kind() -> None:
    known = (Correction("A", 1, 3, 2.0), Correction("A", 2, 3, 4.0), Correction("B", 0, 4, 9.0))
    found = factors_of(known, "A", layers=4)
    assert found is not None
    assert found.tolist() == [3.0, 2.0, 3.0, 3.0]
    assert factors_of(known, "C", layers=4) is None


def test_corrected_times_have_a_note() -> None:
    plain = LayerTimes(np.array([1.0, 2.0]), np.array([3.0, 4.0]), 5.0, MEASURED)
    found = corrected(plain, np.array([2.0, 1.0]), gpu="A")
    assert (found.forward.tolist(), found.backward.tolist()) == ([2.0, 2.0], [6.0, 4.0])
    assert found.optimizer_s_per_parameter == 7.5
    assert "1.50 times as long as profiled" in found.provenance.notes[0]
