"""Mutations of where a generation begins, and of what is released and needed before it."""

from __future__ import annotations

from tests.mutations.mutation import core

RELEASE_MUTATIONS = [
    *core(
        "sailord/core/queries/restore_point.py",
        (
            "a point of an abandoned generation is restored",
            "            return point.step <= end\n    return False",
            "            return point.step <= end\n    return True",
        ),
        (
            "an incomplete point is restored",
            "if pieces.keys() >= whole and all(",
            "if all(piece not in pieces or ",
        ),
        (
            "an older snapshot wins over a later checkpoint",
            "if newest is not None and (durable is None or newest.step >= durable.point.step):",
            "if newest is not None:",
        ),
        (
            "the last safe copy is released",
            "safe = complete_points(held, layers, atoms, copies=copies, domains=domains)",
            "safe = {sealed.point for _, sealed in held}",
        ),
        (
            "a further loss takes a job back to the oldest safe point",
            "return max(line & safe)",
            "return min(line & safe)",
        ),
        (
            "the only point that a further loss might leave is given up",
            "return max(outlives, default=last.fallback)",
            "return restore.point",
        ),
        (
            "of two points that the same loss takes, one is kept for the other",
            "if alone.isdisjoint(complete[point])}",
            "}",
        ),
        (
            "two nodes of one zone count as two failure domains",
            "return {id_: zone if by_zone else id_ for",
            "return {id_: id_ for",
        ),
    ),
    *core(
        "sailord/core/queries/restore_choice.py",
        (
            "a job that must survive a zone's loss gives up what a node's loss leaves",
            'if state.job.saving.survive == "zone":',
            "if False:",
        ),
    ),
    *core(
        "sailord/core/queries/drain_status.py",
        (
            "a node alone has the newest step and is called safe to stop",
            "(each.point.generation, each.point.step) >= end",
            "each.point.generation == release.generation and each.point >= release",
        ),
    ),
]
