"""Mutations of the wait for survivors that seal their state."""

from __future__ import annotations

from tests.mutations.mutation import core

SEAL_MUTATIONS = [
    *core(
        "sailord/core/queries/sealing.py",
        (
            "survivors that seal are not awaited",
            "return any(",
            "return False and any(",
        ),
        (
            "a wait may cost more than the steps that it saves",
            "min(SEAL_SLACK * sealing.ready_in_s, redo_s)",
            "SEAL_SLACK * sealing.ready_in_s",
        ),
        (
            "a seal is awaited for as long as it is announced",
            "return since + max(",
            "return state.now + max(",
        ),
        (
            "survivors that are not heard are awaited",
            "if since is None or not _is_heard(state, node):",
            "if since is None:",
        ),
    ),
    *core(
        "agents/core/decide.py",
        (
            "workers are killed while they seal",
            "if gang.sealing is None or gang.sealing_since is None:",
            "if True:",
        ),
    ),
]
