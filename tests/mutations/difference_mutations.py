"""Mutations of what follows when replicas differ."""

from __future__ import annotations

from tests.mutations.mutation import core

DIFFERENCE_MUTATIONS = [
    *core(
        "sailord/core/rules/quarantine.py",
        (
            "any number of nodes is quarantined",
            "    return out >= max(1, int(state.options.left_out_share * len(living)))\n",
            "    return out > len(living)\n",
        ),
    ),
    *core(
        "sailord/core/rules/replica_differences.py",
        (
            "a job goes back to a checkpoint of after its replicas agreed",
            "is_thorough=False, step_max=agreed)",
            "is_thorough=False)",
        ),
        (
            "a plan is made before it is known which checkpoint can be read",
            "if check.why_none else WAIT",
            "if check.why_none else PASS",
        ),
        (
            "a checkpoint of right steps on its way is not awaited",
            "    if known.commit is not None:\n        return WAIT\n",
            "",
        ),
        (
            "a storage that does not answer is awaited for ever",
            "if state.now >= known.differed_at + DECIDE_WITHIN_S:",
            "if False:",
        ),
    ),
    *core(
        "sailord/core/queries/differences.py",
        (
            "an operator's rollback is replaced",
            "return known or last_rollback(active) is not None",
            "return known",
        ),
    ),
    *core(
        "sailord/core/queries/replan_triggers.py",
        (
            "a pause comes before the rollback",
            " or [o for o in orders if o.wrong_bits]",
            "",
        ),
    ),
    *core(
        "sailord/core/rules/operator_orders.py",
        (
            "a spent budget forgets the rollback",
            "order.wrong_bits or not over_budget(state)",
            "not over_budget(state)",
        ),
    ),
    *core(
        "sailord/core/rules/checkpoint_rules.py",
        (
            "what differs between replicas becomes durable",
            "right is not None and upload.point.step > right",
            "False",
        ),
        (
            "what differs becomes durable if it was on its way",
            "commit.point.step > right and",
            "False and",
        ),
        (
            "an answer about any checkpoint is taken for one about older ones",
            "(check.of, check.step_max) == (\n            (event.of, event.step_max)\n        ):",
            "check.of == event.of:",
        ),
    ),
]
