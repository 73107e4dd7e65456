"""Error bars: links count by what they take of an iteration, and the record lies inside."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from simulator.api import Measurements, load_measurements
from simulator.documents.files import load_document
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import platform_of
from simulator.network.network import CATALOGUE_LINK
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan
from simulator.spec.provenance import MEASURED
from simulator.validate_runs import validate
from tests.simulator.worlds import (
    SEQUENCE,
    World,
    even_profile,
    place,
    small_model,
    stage,
    world_of,
)

GPU = "A100-40"
ZONES = ("us-central1-a", "us-central1-b")
OWN = MEASURED.relative_error + platform_of(GPU).residual
"""Error bar of measured passes without links."""
NOTE = CATALOGUE_LINK.notes[0]


def world(layer_s: float, *, zone_bytes_per_s: float | None = None) -> World:
    """Layers that were measured to take ``layer_s`` a sample, and links of the catalogue."""
    job = Job("small", small_model(), global_batch=16, sequence=SEQUENCE, max_tp=4)
    caps = {}
    if zone_bytes_per_s is not None:
        caps = dict.fromkeys(itertools.permutations(ZONES, 2), zone_bytes_per_s)
    return world_of(job, profile=even_profile(job, {GPU: layer_s}), zone_caps=caps)


def at(node: str, zone: str = ZONES[0]) -> Place:
    return place(GPU, zone, node=node)


def piped(*ends: Place) -> Plan:
    """One pipeline of two stages."""
    return Plan(1, (Pipeline(16, (stage(0, 3, ends[0]), stage(3, 6, ends[1]))),))


def copied(*nodes: Place) -> Plan:
    """A whole model on each node."""
    each = 16 // len(nodes)
    return Plan(1, tuple(Pipeline(each, (stage(0, 6, node),)) for node in nodes))


def estimated(world: World, plan: Plan) -> Estimate:
    return world.estimator.estimate(plan)


def test_short_messages_between_machines_hardly_widen_the_bar() -> None:
    slow = world(layer_s=0.1)
    inside = estimated(slow, piped(at("a"), at("a"))).provenance
    assert inside.relative_error == pytest.approx(OWN)
    across = estimated(slow, piped(at("a"), at("b"))).provenance
    assert OWN <= across.relative_error < OWN + 0.003
    assert (across.source, NOTE in across.notes) == ("measured", False)


def test_a_plan_that_waits_for_a_link_has_the_error_of_the_link() -> None:
    capped = world(layer_s=1e-4, zone_bytes_per_s=1e5)
    found = estimated(capped, piped(at("a"), at("b", ZONES[1]))).provenance
    most = CATALOGUE_LINK.relative_error + platform_of(GPU).residual
    assert most - 0.03 < found.relative_error <= most
    assert found.source == "analytic"
    assert NOTE in found.notes


def test_waiting_for_links_does_not_narrow_the_bar_of_compute_times() -> None:
    """Computed passes are known worse than links."""
    job = Job("small", small_model(), global_batch=16, sequence=SEQUENCE, max_tp=4)
    caps = dict.fromkeys(itertools.permutations(ZONES, 2), 1e7)
    computed = world_of(job, zone_caps=caps)
    near = estimated(computed, piped(at("a"), at("a")))
    far = estimated(computed, piped(at("a"), at("b", ZONES[1])))
    assert near.compute_error == far.compute_error == near.provenance.relative_error
    assert far.provenance.relative_error != pytest.approx(near.provenance.relative_error)


def test_gradient_sums_between_nodes_of_one_place_kind_count() -> None:
    """Also if the plan names no nodes."""
    quick = world(layer_s=1e-5)
    alone = estimated(quick, copied(at("a"), at("a"))).provenance
    assert alone.relative_error == pytest.approx(OWN)
    for nodes in ((at("a"), at("b")), (place(GPU),) * 8):
        plan = copied(*nodes)
        found = estimated(quick, plan)
        bar = found.provenance.relative_error
        # What is not compute is sums: the share of the link in the iteration.
        busy_s = max(s.compute_s + s.optimizer_s for row in found.stages for s in row)
        sums_s = found.stages[0][0].communication_s
        share = min(found.iteration_s - busy_s, sums_s) / found.iteration_s
        assert share > 0.02
        wanted = OWN + share * (CATALOGUE_LINK.relative_error - MEASURED.relative_error)
        assert bar == pytest.approx(wanted, rel=0.05)
        assert NOTE in found.provenance.notes


def test_nine_of_ten_runs_on_record_lie_inside_their_error_bars(reference: Path) -> None:
    facts = load_catalogue(reference / "public_runs_catalogue.toml")
    others = validate(
        load_document(reference / "public_runs.json"), measurements=Measurements(), catalogue=facts
    )
    catalogue = load_catalogue()
    profiled = validate(
        load_document(reference / "validation.json"),
        measurements=load_measurements(reference, catalogue=catalogue),
        catalogue=catalogue,
    )
    for report in (others, profiled):
        for source, runs in report.by_source().items():
            inside = [run.is_inside for run in runs]
            assert sum(map(bool, inside)) >= 0.9 * len(inside), source
            assert max(run.error_bar for run in runs) < 0.27, source
