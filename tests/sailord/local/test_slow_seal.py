"""A worker is lost while sealing takes seconds: the others seal, and no step is lost."""

from __future__ import annotations

import pytest

from tests.sailord.local.running import told_by

pytestmark = pytest.mark.slow


def test_step_that_survivors_seal_for_seconds_is_not_lost(folder):
    told = told_by("sealing_cluster", folder)
    assert told["point"]["step"] >= told["killed_at"], "the leader began from the snapshot before"
    assert [move["steps_lost"] for move in told["moves"]] == [0, 0]
