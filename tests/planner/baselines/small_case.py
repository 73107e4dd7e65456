"""A real job, OPT-350M, on a small cluster of a test's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from planner.compare.interface import Case, ProposedPlan
from simulator.api import network_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_check import check_plan
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Plan

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "opt-350m.toml"


def pool(gpu: str, gpus: int, *, per_machine: int, zone: str = "us-central1-a") -> Pool:
    return Pool(zone, gpu, f"{gpu}x{per_machine}", per_machine, gpus)


@cache
def _load_known() -> tuple[Job, Catalogue]:
    return load_job(EXAMPLE), load_catalogue()


def small_case(*pools: Pool, **changes: Any) -> Case:
    """The case of these pools; ``changes`` are made to the job."""
    job, catalogue = _load_known()
    job = replace(job, **{"global_batch": 64, **changes})
    cluster = Cluster(pools, catalogue)
    network = network_of(cluster, MeasuredNetwork())
    costs = LayerCosts(job, profile=None, catalogue=catalogue, network=network)
    return Case(job, cluster, costs, network, PlaceFacts(cluster, MeasuredNetwork()))


def checked_plans(case: Case, proposals: Sequence[ProposedPlan]) -> list[Plan]:
    """Return the plans of sorted proposals, each of which has a valid one or says why not."""
    seconds = [proposal.seconds for proposal in proposals]
    assert seconds == sorted(seconds)
    assert all((proposal.plan is None) == bool(proposal.why_not) for proposal in proposals)
    plans = [proposal.plan for proposal in proposals if proposal.plan is not None]
    assert all(check_plan(plan, case.job, case.cluster) == () for plan in plans)
    return plans


def gpus_of(plans: Sequence[Plan]) -> set[str]:
    """Return the kinds of GPUs that any of the plans uses, with their zones."""
    return {name for plan in plans for name in plan.gpus_used()}
