"""Zero-bubble variants of judged plans: the same stages with divided backwards.

The gradients of weights fill the wait at the end of an iteration, and what they need is kept longer
(``simulator.estimate.pass_order``). So plans with few micro batches and room in memory gain. The
best variant is then changed in small steps: without the wait, deeper pipelines may be better.
"""

from __future__ import annotations

from dataclasses import replace

from planner.search.chunks import waiting_families
from planner.search.local_search import EventSearch, JudgedPlan
from planner.search.variants import best_variant
from simulator.spec.plan import Plan


def best_without_bubble(search: EventSearch) -> JudgedPlan | None:
    """Judge zero-bubble variants of good plans, and return the best that keeps all limits.

    Where no plan keeps the limits, variants of those that break them least are judged.
    """
    starts = waiting_families(search, lambda plan: plan.schedule == "1f1b")
    return best_variant(search, starts, divided)


def divided(plan: Plan) -> Plan:
    """The plan with divided backwards."""
    return replace(plan, schedule="zero-bubble")
