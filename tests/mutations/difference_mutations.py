"""Mutations of what follows when replicas differ."""

from __future__ import annotations

from tests.mutations.mutation import core

DIFFERENCE_MUTATIONS = [
    *core(
        "sailord/core/rules/quarantine.py",
        (
            "any number of nodes is quarantined",
            "    return out >= max(1, int(state.options.slow_share * len(living)))\n",
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
            "        return WAIT\n",
            "        return PASS\n",
        ),
        (
            "a pause comes before the rollback",
            "orders=(order, *active.orders)",
            "orders=(*active.orders, order)",
        ),
        (
            "a difference at a stop is not looked at",
            "Waiting | Stopping):",
            "Waiting):",
        ),
        (
            "an operator's rollback is replaced",
            " or last_rollback(active) is not None",
            "",
        ),
    ),
    *core(
        "sailord/core/rules/checkpoint_rules.py",
        (
            "what differs between replicas becomes durable",
            "agreed is not None and upload.point.step > agreed",
            "False",
        ),
        (
            "an answer about any checkpoint is taken for one about older ones",
            "(check.of, check.step_max) == (\n            (event.of, event.step_max)\n        ):",
            "check.of == event.of:",
        ),
    ),
]
