"""Real workers measure when their passes run, and sailord shows it beside the prediction."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.sailord.local.running import told_by

pytestmark = pytest.mark.slow


def test_stages_of_a_pipeline_show_when_their_passes_ran(folder):
    told = told_by("measured_cluster", folder)
    whole, measured = told["whole"], told["whole"]["measured"]
    assert 0 <= measured["step"] <= told["step"]
    (predicted,) = whole["timeline"]["pipelines"]
    (pipeline,) = measured["pipelines"]
    first, second = pipeline["groups"]
    places = [(group["stage"], group["rank"]) for group in predicted["groups"]]
    assert [(group["stage"], group["rank"]) for group in (first, second)] == places
    for group, expected in zip((first, second), predicted["groups"], strict=True):
        passes = group["passes"]
        assert [(p[0], p[3]) for p in passes] == [(p[0], p[3]) for p in expected["passes"]]
        assert passes[0][1] >= 0
        assert all(begin <= end for _, begin, end, _ in passes)
        assert all(p[2] <= q[1] for p, q in pairwise(passes)), "passes of one rank overlap"
        assert passes[-1][2] <= group["update"][0] <= group["update"][1]
        # Both are differences of the same moments, rounded apart.
        assert group["update"][1] <= measured["length_s"] + 1e-9
        forwards, backwards = by_batch(passes, "F"), by_batch(passes, "B")
        assert all(forwards[batch][1] <= backwards[batch][0] for batch in forwards)
    # Between ranks: the second stage computes what comes from the first, and the other way back.
    for kind, before, after in (("F", first, second), ("B", second, first)):
        sooner, later = by_batch(before["passes"], kind), by_batch(after["passes"], kind)
        assert all(sooner[batch][0] < later[batch][0] for batch in sooner)
    alone = told["measured_alone"]
    assert alone["timeline"] is None
    assert alone["measured"] is not None


def by_batch(passes: list, kind: str) -> dict[int, tuple[float, float]]:
    """Return begin and end of the passes of a kind by micro batch."""
    return {batch: (begin, end) for k, begin, end, batch in passes if k == kind}
