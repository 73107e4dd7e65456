"""Mutations of what becomes of a question to the planner, and of its answer."""

from __future__ import annotations

from tests.mutations.mutation import core

QUESTION_MUTATIONS = [
    *core(
        "sailord/core/rules/planner_answer.py",
        (
            "a question has no deadline",
            "case None if state.now < question.deadline:",
            "case None if state.now < question.deadline + 9999:",
        ),
        (
            "a plan that does not pay is adopted",
            "if not question.is_forced and not proposal.is_worth_it:",
            "if question.is_forced and not proposal.is_worth_it:",
        ),
        (
            "a notice waits for an answer that leaves its node out",
            "if alive and not question.is_forced and _must_change(state, active):",
            "if False:",
        ),
        (
            "new nodes are forgotten with a question that one of them ends",
            "rest = replace(rest, asked=replace(rest.asked, nodes=frozenset()))",
            "rest = replace(rest)",
        ),
    ),
]
