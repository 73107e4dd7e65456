"""A bit flips in the weights of one rank: the steps since all agreed are done again, without it."""

from __future__ import annotations

import pytest

from tests.fakes.flipping_worker import STEP
from tests.sailord.local.running import told_by

pytestmark = pytest.mark.slow


def test_steps_with_a_wrong_bit_are_done_again_from_the_checkpoint_before(folder):
    told = told_by("flipping_cluster", folder)
    assert told["restore"]["source"] == "durable"
    assert told["restore"]["point"]["step"] < STEP
    assert told["quarantined"] == ["a2"]
    assert told["wrong"], "the bit changes losses, and on all ranks"
    assert {generation for generation, _ in told["wrong"]} == {1}
    step = told["restore"]["point"]["step"]
    assert any(text.startswith(f"going back to step {step}: steps") for text in told["said"])
