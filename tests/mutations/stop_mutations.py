"""Mutations of how a job is paused, and of what may end while its memory is still needed."""

from __future__ import annotations

from tests.mutations.mutation import core

STOP_MUTATIONS = [
    *core(
        "sailord/core/rules/operator_orders.py",
        (
            "a pause gives up what only memory holds",
            "    return PASS if kept is WAIT else kept\n",
            '    return close(state, active, "paused", reason)\n',
        ),
        (
            "a pause does not hear the survivors first",
            "is_gathering or not holders_reported(state, active)",
            "False",
        ),
        (
            "a pause waits for a plan that there is not",
            "isinstance(phase, Waiting) and active.asked.is_refused",
            "False",
        ),
    ),
    *core(
        "sailord/core/queries/restore_choice.py",
        (
            "a job that is back does not hear what nodes kept of it",
            " or _speak_of_another(state, active):",
            ":",
        ),
    ),
    *core(
        "sailord/core/rules/phase_rules.py",
        (
            "a pause ends although a member is lost before its step is kept",
            "if not goes_on and (stopped is None or not is_alive(state, active)):",
            "if False:",
        ),
    ),
    *core(
        "sailord/core/rules/planner_answer.py",
        (
            "members wait for one that will not join any more",
            "cannot_stop = is_joining(state, active) or ",
            "cannot_stop = ",
        ),
    ),
    *core(
        "agents/core/decide.py",
        (
            "an agent ends before it knows the next generation",
            '    if state.node.id in record.members or record.state == "stopping":\n',
            "    if False:\n",
        ),
    ),
]
